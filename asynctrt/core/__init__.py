"""What an engine is put together from: inputs that are checked, padding, the assembly of its parts."""
