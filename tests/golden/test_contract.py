"""The wire contract, field by field. A change here changes what others have built on."""

from __future__ import annotations

import os
from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor, FileDescriptor
from legato.v1 import inference_pb2, worker_pb2

GOLDEN = Path(__file__).with_name("contract.txt")
TYPES = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def describe(file: FileDescriptor) -> list[str]:
    lines = [f"# {file.name}"]
    for service in file.services_by_name.values():
        for method in service.methods:
            arrow = f"{method.input_type.name} -> {method.output_type.name}"
            lines.append(f"rpc {service.full_name}/{method.name}: {arrow}")
    for enum in file.enum_types_by_name.values():
        lines += [f"enum {enum.name}.{value.name} = {value.number}" for value in enum.values]
    for message in file.message_types_by_name.values():
        for field in message.fields:
            kind = TYPES[field.type]
            if field.message_type or field.enum_type:
                kind = (field.message_type or field.enum_type).name
            many = "repeated " if field.is_repeated else ""
            group = field.containing_oneof.name if field.containing_oneof else ""
            where = f" [{group}]" if group and not group.startswith("_") else ""
            maybe = "optional " if group.startswith("_") else ""
            lines.append(f"{message.name}.{field.name} = {field.number} {many}{maybe}{kind}{where}")
    return lines


def test_contract_is_the_recorded_one() -> None:
    text = "\n".join([*describe(inference_pb2.DESCRIPTOR), *describe(worker_pb2.DESCRIPTOR)]) + "\n"
    if os.environ.get("LEGATO_UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), (
        "the contract changed; if that is meant: LEGATO_UPDATE_GOLDEN=1 python -m pytest "
        "tests/golden/test_contract.py, and say why in the commit"
    )
