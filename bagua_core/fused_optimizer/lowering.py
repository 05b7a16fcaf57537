"""Which program of the CPU's library does what a recording says? Pure; no tensors.

What the library has no operation for raises NotRecordable: such a step goes on as it was. Operations come out equal to
torch's bit by bit, which library_program.py proves for each program before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bagua_core.fused_optimizer.recording import NotRecordable, Number, Operation, Recording, Shared, Value
from bagua_core.kernels.elementwise import Step

LEAST_STEPS = 2  # one alone passes over memory once already

# With a number in place of the second operand, and with a tensor there.
_BINARY = {
    "mul": ("multiply_number", "multiply"),
    "add": ("add_number", "add"),
    "sub": ("subtract_number", "subtract"),
    "div": ("divide_number", "divide"),
    "clamp_min": ("at_least", None),
    "clamp_max": ("at_most", None),
    "maximum": (None, "maximum"),
    "minimum": (None, "minimum"),
}
_COMMUTE = ("mul", "add")
_UNARY = {
    "sqrt": "sqrt",
    "abs": "absolute",
    "neg": "negative",
    "sign": "sign",
    "reciprocal": "reciprocal",
    "clone": "copy",
}
_SCALED = {"add_scaled": "add_scaled", "subtract_scaled": "subtract_scaled", "lerp": "interpolate"}
_THREE = {"addcmul": "add_product", "addcdiv": "add_quotient"}
_FILLED = {"zero": 0.0, "zeros_like": 0.0, "ones_like": 1.0}
_COMPARISONS = {"gt": "above", "lt": "below", "eq": "equal_to"}  # make masks
HARMLESS_NAMES = ("out", "memory_format", "non_blocking")


@dataclass(frozen=True, slots=True)
class Lowered:
    """memories: the inputs in their order, then those of results that need one. results: the memory of each; that of
    the state whose place it takes, where nobody looks at the old one any more. constants: numbers that belong to the
    program, which come after those of the recording and its shared tensors. written: which memories it writes to."""

    steps: tuple[Step, ...]
    memories: int
    temporaries: int
    results: tuple[int, ...]
    constants: tuple[float, ...]
    written: frozenset[int]


def lower(recording: Recording, variants: Mapping[str, str]) -> Lowered:
    """variants: of operations, which the library is to take in their place. Raises NotRecordable."""
    return _Lowering(recording, variants).lowered()


def _written_to(operation: Operation) -> Any:
    """By one that makes nothing."""
    return dict(operation.named).get("out", operation.arguments[0])


def _values_of(operation: Operation) -> set[int]:
    arguments = (*operation.arguments, *(argument for _, argument in operation.named))
    return {argument.number for argument in arguments if isinstance(argument, Value)}


def _needed(operations: Sequence[Operation], kept: Collection[int]) -> list[Operation]:
    """Without those that only what is not kept comes of, as `state.get(name, torch.zeros_like(p))` has them."""
    live, found = set(kept), []
    for operation in reversed(operations):
        target = operation.made
        if target is None and isinstance(written := _written_to(operation), Value):
            target = written.number
        if target in live:
            live |= _values_of(operation)
            found.append(operation)
    return found[::-1]


def _last_uses(operations: Sequence[Operation]) -> dict[int, int]:
    """By value: the place of the operation that looks at it last, or makes it for nobody."""
    found: dict[int, int] = {}
    for place, operation in enumerate(operations):
        found.update(dict.fromkeys(_values_of(operation), place))
        if operation.made is not None:
            found[operation.made] = place
    return found


def name_of(call: Callable[..., Any]) -> str:
    """Of an operation, whether it writes in place or not."""
    schema = getattr(call, "_schema", None)
    name: str = call.__name__ if schema is None else schema.name.split("::")[-1]
    return name.strip("_")


@dataclass
class _Lowering:
    recording: Recording
    variants: Mapping[str, str]
    steps: list[Step] = field(default_factory=list)
    registers: dict[int, int] = field(default_factory=dict)  # of a value, by its number
    own: dict[int, int] = field(default_factory=dict)  # of a result, likewise
    memories: int = 0
    free: list[int] = field(default_factory=list)  # temporaries
    temporaries: int = 0
    masks: set[int] = field(default_factory=set)  # values
    constants: list[float] = field(default_factory=list)

    def lowered(self) -> Lowered:
        recording = self.recording
        inputs, results = recording.inputs, recording.results
        self.registers = {value.number: place for place, value in enumerate(inputs.values())}
        made = {value.number for value in results.values()}
        if len(made | set(self.registers)) < len(results) + len(inputs):
            raise NotRecordable("it keeps one tensor under two names")
        operations = _needed(recording.operations, made | set(self.registers))
        last_use = _last_uses(operations)
        self.memories = len(inputs)
        for name, value in results.items():
            old = inputs.get(("state", name))
            begins = next((i for i, o in enumerate(operations) if o.made == value.number), -1)
            if old is not None and last_use.get(old.number, -1) <= begins:
                self.own[value.number] = self.registers[old.number]
            else:
                self.own[value.number] = self.memories
                self.memories += 1
        for place, operation in enumerate(operations):
            self._lower(operation)
            for number, last in last_use.items():
                register = self.registers.get(number, -1)
                if last == place and register >= self.memories:
                    self.free.append(register)
        if len(self.steps) < LEAST_STEPS:
            raise NotRecordable("it passes over memory once as it is")
        if self.masks & made:
            raise NotRecordable("it keeps a mask")
        return Lowered(
            tuple(self.steps),
            self.memories,
            self.temporaries,
            tuple(self.own[value.number] for value in results.values()),
            tuple(self.constants),
            frozenset(step.to for step in self.steps if step.to < self.memories),
        )

    # -- operands

    def _register(self, argument: Any) -> int:
        if not isinstance(argument, Value) or argument.number in self.masks:
            raise NotRecordable("an operand of an operation is of another sort than the library has")
        return self.registers[argument.number]

    def _mask(self, argument: Any) -> int:
        if not isinstance(argument, Value) or argument.number not in self.masks:
            raise NotRecordable("a choice goes by something that is not a comparison")
        return self.registers[argument.number]

    def _number(self, argument: Any) -> int:
        if isinstance(argument, Number):
            return argument.place
        if isinstance(argument, Shared):
            return len(self.recording.numbers) + argument.place
        if isinstance(argument, (int, float)):
            self.constants.append(float(argument))
            return len(self.recording.numbers) + len(self.recording.shared) + len(self.constants) - 1
        raise NotRecordable("an operand of an operation is no number")

    def _target(self, operation: Operation) -> int:
        if operation.made is None:
            return self._register(_written_to(operation))
        if operation.made in self.own:
            register = self.own[operation.made]
        elif self.free:
            register = self.free.pop()
        else:
            register = self.memories + self.temporaries
            self.temporaries += 1
        self.registers[operation.made] = register
        return register

    # -- operations

    def _lower(self, operation: Operation) -> None:
        name, arguments = name_of(operation.call), operation.arguments
        if any(
            named not in HARMLESS_NAMES and value not in (None, False) for named, value in operation.named
        ):
            raise NotRecordable(f"{name} has arguments that the library's operation lacks")
        if name in _COMPARISONS and len(arguments) == 2:
            x, number = self._register(arguments[0]), self._number(arguments[1])
            if operation.made is None:
                raise NotRecordable(f"{name} writes in place")
            self.masks.add(operation.made)
            self._add(_COMPARISONS[name], operation, x, number=number)
        elif name == "fill_where" and len(arguments) == 3:
            x, mask, number = (
                self._register(arguments[0]),
                self._mask(arguments[1]),
                self._number(arguments[2]),
            )
            self._add("replace_where", operation, x, mask, number=number)
        elif name == "where" and len(arguments) == 3:
            y, z = self._register(arguments[1]), self._register(arguments[2])
            self._add("choose", operation, self._mask(arguments[0]), y, z)
        elif name in _UNARY and len(arguments) == 1:
            self._add(_UNARY[name], operation, self._register(arguments[0]))
        elif name == "copy" and len(arguments) in (2, 3):
            self._add("copy", operation, self._register(arguments[1]))
        elif name in _FILLED and len(arguments) == 1:
            self._add("fill", operation, number=self._number(_FILLED[name]))
        elif name == "fill" and len(arguments) == 2:
            self._add("fill", operation, number=self._number(arguments[1]))
        elif name == "square" or (name == "pow" and arguments[1:] == (2,)):
            x = self._register(arguments[0])
            self._add("multiply", operation, x, x)
        elif name in _BINARY and len(arguments) == 2:
            self._lower_binary(name, operation)
        elif name == "clamp":
            self._lower_clamp(operation)
        elif name in _SCALED and len(arguments) == 3:
            x, y = self._register(arguments[0]), self._register(arguments[1])
            self._add(_SCALED[name], operation, x, y, number=self._number(arguments[2]))
        elif name in _THREE and len(arguments) in (3, 4):
            operands = [self._register(argument) for argument in arguments[:3]]
            scale = arguments[3] if len(arguments) == 4 else 1.0
            self._add(_THREE[name], operation, *operands, number=self._number(scale))
        else:
            raise NotRecordable(f"the library has no {name}")

    def _lower_binary(self, name: str, operation: Operation) -> None:
        one, other = operation.arguments
        if name in _COMMUTE and not isinstance(one, Value):
            one, other = other, one
        with_number, with_tensor = _BINARY[name]
        x = self._register(one)
        if isinstance(other, Value):
            if with_tensor is None:
                raise NotRecordable(f"the library has no {name} with a tensor")
            self._add(with_tensor, operation, x, self._register(other))
        else:
            if with_number is None:
                raise NotRecordable(f"the library has no {name} with a number")
            self._add(with_number, operation, x, number=self._number(other))

    def _lower_clamp(self, operation: Operation) -> None:
        bounds = (*operation.arguments[1:], None, None)[:2]
        given = [(n, b) for n, b in zip(("at_least", "at_most"), bounds, strict=True) if b is not None]
        if not given:
            raise NotRecordable("a clamp without bounds")
        x = self._register(operation.arguments[0])
        to = self._target(operation)
        for name, bound in given:
            self.steps.append(Step(name, to, x, number=self._number(bound)))
            x = to

    def _add(
        self, name: str, operation: Operation, x: int = 0, y: int = 0, z: int = 0, *, number: int = 0
    ) -> None:
        self.steps.append(Step(self.variants.get(name, name), self._target(operation), x, y, z, number))
