"""Small parts that know nothing of engines: clocks, files, loops, processes, checks of settings."""
