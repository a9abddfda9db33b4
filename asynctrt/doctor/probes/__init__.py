"""What runs in child processes, each a file with a function ``probe``: it may crash or hang.

A probe takes texts and returns what JSON can hold. Those that look at the machine import the standard library
alone, so that they tell what is wrong even if a package is broken.
"""
