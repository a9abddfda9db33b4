"""The asyncio half, which carries out the scheduler's decisions on one event loop."""
