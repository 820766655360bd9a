"""Which spec each leaf gets: by rules, as in another checkpoint, or by its shape alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.conversion.mapping import read_rule_tables
from ckptkit.conversion.resharding.meshes import Mesh, Spec, box_shape, default_spec
from ckptkit.errors import CheckpointError
from ckptkit.model.leaf_patterns import matches, short_names

STAYS_WHOLE = "no axis divides it"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecRule:
    """Leaves whose names match `pattern` are split by `spec`."""

    pattern: str
    spec: Spec


def read_spec_rules(path: str) -> list[SpecRule]:
    """The rules of a TOML file: `[[rule]]` with `leaf` and `spec`. Raises `CheckpointError` for what is none."""
    return read_rule_tables(path, _rule)


def _rule(table: dict[str, Any]) -> SpecRule:
    if set(table) != {"leaf", "spec"} or not isinstance(table["leaf"], str) or not isinstance(table["spec"], list):
        raise ValueError('a rule has leaf = "PATTERN" and spec = [an axis, a list of axes or "" for each dimension]')
    return SpecRule(pattern=table["leaf"], spec=tuple(map(_part, table["spec"])))


def _part(part: Any) -> tuple[str, ...]:
    names = [part] if isinstance(part, str) else part
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{part!r} in a spec is neither an axis nor a list of axes")
    return tuple(name for name in names if name)


class Chooser:
    """The spec of a leaf on a mesh, and how it was chosen. Raises `CheckpointError` for what does not fit."""

    def __init__(self, meshes: Sequence[Mesh], rules: Sequence[SpecRule], like: Mapping[str, Spec] | None):
        known = {name for mesh in meshes for name, _ in mesh.axes}
        for rule in rules:
            strange = sorted({name for part in rule.spec for name in part} - known)
            if strange:
                raise CheckpointError(
                    f"the rule for {rule.pattern} names axis {strange[0]}, which no mesh has; the axes are "
                    f"{', '.join(sorted(known))}"
                )
        self._rules = tuple(rules)
        self._like = like
        self.used: set[str] = set()

    def spec(self, name: str, shape: Sequence[int], mesh: Mesh) -> tuple[Spec, str]:
        """Spec and the reason: `rule PATTERN`, `as in the other checkpoint`, `largest dimension`, `STAYS_WHOLE`
        where that is divided by no axis, or `nothing to split`."""
        for rule in self._rules:
            if any(matches(rule.pattern, form) for form in (name, *short_names([name]))):
                self.used.add(rule.pattern)
                return self._fitting(name, rule.spec, shape, mesh), f"rule {rule.pattern}"
        if self._like is not None:
            if name not in self._like:
                raise CheckpointError(f"leaf {name} has no sharding in the checkpoint that --like names")
            return self._fitting(name, self._like[name], shape, mesh), "as in the other checkpoint"
        spec = default_spec(shape, mesh)
        if spec or mesh.devices == 1:
            return spec, "largest dimension"
        return spec, STAYS_WHOLE if math.prod(shape) > 1 else "nothing to split"

    def unused(self) -> list[str]:
        """The patterns that matched no leaf."""
        return [rule.pattern for rule in self._rules if rule.pattern not in self.used]

    def _fitting(self, name: str, spec: Spec, shape: Sequence[int], mesh: Mesh) -> Spec:
        try:
            box_shape(shape, spec, mesh)
        except ValueError as error:
            raise CheckpointError(f"leaf {name} of shape {list(shape)}: {error}") from error
        return spec
