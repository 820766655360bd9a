"""What a root takes, and what was done about it, as text."""

from __future__ import annotations

from ckptkit.cli.text import count_text, print_line, print_table, size_text
from ckptkit.upkeep import PrunePlan, RollbackPlan, Usage

_KINDS = ("arrays", "small", "metadata", "digests")


def show_usage(found: Usage, plan: PrunePlan | None) -> None:
    """Prints it on stdout."""
    dead = sum(each.stored_bytes for each in found.dead)
    print_line(
        f"{found.root}: {size_text(found.stored_bytes)} ({found.stored_bytes} bytes), "
        f"{count_text(len(found.steps), 'step')}, {size_text(dead)} dead weight"
    )
    for note in found.notes:
        print_line(f"  {note}")
    if found.steps:
        print_line()
        kinds = [(kind, True) for kind in _KINDS]
        rows = []
        for each in found.steps:
            pinned = f", pinned ({each.pin_reason})" if each.pin_reason else ", pinned" * each.pinned
            state = each.state + pinned + ", in use" * each.in_use
            items = ", ".join(f"{name} {size_text(size)}" for name, size in each.items.items() if name)
            sizes = [size_text(each.kinds.get(kind, 0)) for kind in _KINDS]
            rows.append([str(each.step), state, size_text(each.stored_bytes), *sizes, items])
        print_table([("step", True), ("state", False), ("bytes", True), *kinds, ("items", False)], rows)
    if found.arenas:
        print_line()
        print_table(
            [("tier", False), ("arena", False), ("held", False), ("saves", True), ("slots", True), ("bytes", True)],
            [
                [
                    a.tier,
                    a.path,
                    "running" if a.live else "no",
                    str(len(a.saves)),
                    str(a.slots),
                    size_text(a.stored_bytes),
                ]
                for a in found.arenas
            ],
        )
    if found.dead:
        print_line()
        rows = [[each.kind, size_text(each.stored_bytes), each.path, each.remedy] for each in found.dead]
        print_table([("dead weight", False), ("bytes", True), ("where", False), ("how it goes", False)], rows)
    if plan is not None:
        print_line()
        gone = ", ".join(str(each.step) for each in plan.doomed)
        which = f"{size_text(plan.freed_bytes)}: {'steps' if len(plan.doomed) > 1 else 'step'} {gone}"
        print_line(f"a pruning would free {which if gone else 'nothing'}")


def show_prune(plan: PrunePlan) -> None:
    """Prints it on stdout."""
    words = {"keep": "stays", "delete": "deleted" if plan.done else "would go", "leave": "left"}
    verb = "freed" if plan.done else "would be freed"
    proven = "no step of it is whole" if plan.proven is None else f"the newest whole step is {plan.proven}"
    freed = f"{len(plan.doomed)} of {count_text(len(plan.steps), 'step')}, {size_text(plan.freed_bytes)} {verb}"
    print_line(f"{plan.root}: {freed}; {proven}")
    if plan.steps:
        print_line()
        rows = [
            [
                str(each.step),
                each.state,
                "" if each.save_id is None else str(each.save_id),
                size_text(each.stored_bytes),
                words[each.act],
                ", ".join(each.reasons),
            ]
            for each in plan.steps
        ]
        titles = ("step", "state", "save", "bytes", "what", "why")
        print_table([(title, title in ("step", "bytes")) for title in titles], rows)


def show_rollback(plan: RollbackPlan) -> None:
    """Prints it on stdout."""
    verb = "superseded" if plan.done else "would be superseded"
    print_line(f"{plan.root}: goes on from step {plan.step}; {count_text(len(plan.abandoned), 'newer step')} {verb}")
    for note in plan.notes:
        print_line(f"  {note}")
    if plan.abandoned:
        print_line()
        rows = [
            [
                str(each.step),
                "" if each.save_id is None else str(each.save_id),
                ", ".join(holding.tier for holding in each.holdings),
            ]
            for each in plan.abandoned
        ]
        print_table([("step", True), ("save", False), ("tiers", False)], rows)
