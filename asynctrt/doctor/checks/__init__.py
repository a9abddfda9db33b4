"""The interpretation of the facts. Each check takes facts and yields findings; it examines nothing itself."""
