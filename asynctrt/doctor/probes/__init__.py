"""Code that may crash or hang, and so runs in child processes. Each file has a function ``probe``.

A probe takes strings and returns a value that JSON can represent. Probes that examine the machine import only
the standard library, so that they work even if a package is broken.
"""
