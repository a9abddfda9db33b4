"""What the facts mean. Each check takes them and yields findings; it looks at nothing itself."""
