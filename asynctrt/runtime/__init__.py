"""The asyncio half: it carries out what the scheduler decides, on one event loop."""
