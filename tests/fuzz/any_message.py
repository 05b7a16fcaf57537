"""Messages of any protobuf type with anything in them that their fields can hold."""

from __future__ import annotations

from google.protobuf.message import Message
from hypothesis import strategies as st

from tests.fuzz.store_picture import NONCE

INTS = st.sampled_from([0, 1, 2, 3, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1]) | st.integers(0, 2**64 - 1)
WORDS = st.sampled_from(["", "a", "b", "a.0.w", "b.0.w", "..", "127.0.0.1:1", NONCE, "x" * 5000]) | st.text(
    max_size=8
)


def fitting(field: object, value: int) -> int:
    """`value` within the range of a protobuf field."""
    kind = field.cpp_type  # type: ignore[attr-defined]
    bounds = {
        field.CPPTYPE_INT32: (-(2**31), 2**31 - 1),  # type: ignore[attr-defined]
        field.CPPTYPE_UINT32: (0, 2**32 - 1),  # type: ignore[attr-defined]
        field.CPPTYPE_INT64: (-(2**63), 2**63 - 1),  # type: ignore[attr-defined]
        field.CPPTYPE_UINT64: (0, 2**64 - 1),  # type: ignore[attr-defined]
        field.CPPTYPE_ENUM: (0, 2**31 - 1),  # type: ignore[attr-defined]
    }
    low, high = bounds[kind]
    return max(low, min(high, value))


@st.composite
def any_message(draw: st.DrawFn, kind: type[Message]) -> Message:
    """Every field whatever its type allows."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value.update(draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)))
        elif field.message_type is not None and field.is_repeated:
            inner = type(value.add())
            del value[:]
            value.extend(draw(st.lists(any_message(inner), max_size=3)))
        elif field.message_type is not None:
            value.CopyFrom(draw(any_message(type(value))))
        elif field.type == field.TYPE_BYTES:
            setattr(message, field.name, draw(st.binary(max_size=40)))
        elif field.cpp_type == field.CPPTYPE_STRING:
            words = draw(st.lists(WORDS, max_size=2)) if field.is_repeated else draw(WORDS)
            _assign(message, field.name, words)
        elif field.cpp_type == field.CPPTYPE_BOOL:
            setattr(message, field.name, draw(st.booleans()))
        elif field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
            setattr(message, field.name, draw(st.floats(width=32)))
        elif field.is_repeated:
            value.extend(fitting(field, number) for number in draw(st.lists(INTS, max_size=3)))
        else:
            setattr(message, field.name, fitting(field, draw(INTS)))
    return message


def _assign(message: Message, name: str, value: object) -> None:
    if isinstance(value, list):
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)
