"""How a diagnosis looks on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deepinfer_plugins.commands.doctor import Diagnosis


def show(found: Diagnosis, console: Console) -> None:
    """Print it: what is there, what was chosen and why, and what is wrong last, where it is seen."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("engine", f"{found.engine or 'none'} {found.version or ''}".strip())
    facts.add_row("chip", escape(found.chip or "unknown"))
    facts.add_row("graphs", escape(found.graphs or "unknown"))
    facts.add_row("active", "[green]yes[/]" if found.active else "[red]no[/]")
    for kind, names in found.registered.items():
        for name, ours in names.items():
            facts.add_row(kind, f"{escape(name)} -> {escape(ours)}")
    for patch in found.patches:
        when = "" if patch["applied"] else " (when the model is built)"
        facts.add_row("patch", f"{escape(patch['target'])}{when}\n[dim]{escape(patch['why'])}[/]")
    console.print(facts)
    if found.operators:
        table = Table("operator", "provider", "passed over")
        for name, choice in found.operators.items():
            reasons = "\n".join(f"{other}: {why}" for other, why in choice["passed_over"].items())
            table.add_row(name, choice["provider"] or "[red]none[/]", escape(reasons))
        console.print(table)
    for warning in found.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}")
    for problem in found.problems:
        console.print(f"[red]problem:[/] {escape(problem)}")
    if not found.problems:
        console.print("everything asked for is active")
