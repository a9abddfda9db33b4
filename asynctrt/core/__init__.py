"""The building blocks of an engine: the check of inputs, padding, the assembly of its parts."""
