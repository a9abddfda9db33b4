"""Shows a prediction in a terminal."""

from rich.console import Console
from rich.table import Table

from asynctrt.loadtest.views import number
from asynctrt.simulation.plan import Plan, Prediction

SHOWN = ("p50", "p90", "p99", "p99.9", "mean", "max")


def show(out: Console, plan: Plan, made: Prediction, arrivals: str) -> None:
    """Show the figures of a prediction."""
    fleet = f"{plan.settings.devices:,} devices, " if plan.settings.devices > 1 else ""
    table = Table(
        title=f"Predicted for {arrivals}",
        caption=(
            f"{fleet}{plan.contexts} contexts, {plan.arenas or 'no'} arenas, batches of {plan.rows_max}; "
            f"{made.events:,} events in {made.took_s:.1f} s"
        ),
    )
    table.add_column("")
    table.add_column("", justify="right")
    rows = [("requests", f"{made.requests:,}"), ("throughput", f"{number(made.throughput)} requests/s")]
    if made.goodput is not None:
        rows.append(("goodput", f"{number(made.goodput)} requests/s"))
    rows += [
        (f"latency, {name}", f"{number(made.latency[name])} ms") for name in SHOWN if name in made.latency
    ]
    rows.append(("shed", f"{made.shed_share:.2%}"))
    rows += [(f"  {why}", f"{count:,}") for why, count in sorted(made.shed.items())]
    if made.cancelled:
        rows.append(("cancelled", f"{made.cancelled:,}"))
    rows += [("mean batch", f"{number(made.mean_rows)} rows"), ("busy", f"{made.busy_share:.1%}")]
    rows += [(text, "held" if is_held else "missed") for text, is_held in made.slo.items()]
    for row in rows:
        table.add_row(*row)
    out.print(table)
