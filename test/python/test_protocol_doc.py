"""docs/protocol.md describes what the code sends: magic numbers, sizes, fields and kinds."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
SOURCES = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for pattern in ("*.h", "*.cc")
    for path in sorted((ROOT / "common").rglob(pattern))
}
CONSTANT = re.compile(r"^(?:inline |static )?constexpr \w+ (k\w+) = ([^;]+);", re.M)


def source_with(text: str) -> str:
    """The one source file of the core that contains a text."""
    found = [path for path, content in SOURCES.items() if text in content]
    assert len(found) == 1, f"{text!r} is in {[str(path) for path in found]}, expected one file"
    return SOURCES[found[0]]


def constants(text: str) -> dict[str, int]:
    """The constants of a source that are numbers, or computed from those before."""
    values: dict[str, int] = {}
    for content in (source_with("kVersionField ="), text):
        for name, expression in CONSTANT.findall(content):
            words = re.findall(r"\b[a-zA-Z]\w*", expression)
            if re.fullmatch(r"[\w\s+*/()]+", expression) and all(word in values for word in words):
                values[name] = eval(expression, {"__builtins__": {}}, values)
    return values


def production(name: str, section: str) -> str:
    """The right side of a line of grammar below a heading, without its comment."""
    page = PAGE.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    found = re.search(rf"^{name} +=([^;\n]*)", page, re.M)
    assert found, f"docs/protocol.md, {section}: no line '{name} ='"
    return found[1].strip()


def size_of(name: str, section: str) -> int:
    """The bytes of a production, each of whose fields is written as name:bytes."""
    return sum(int(field.split(":")[1]) for field in production(name, section).split())


def fields_of(struct: str) -> list[str]:
    """The names of a struct's fields in their order, arrays with their size."""
    text = source_with(f"struct {struct} {{")
    body = re.split(r"\n *};", text.split(f"struct {struct} {{", 1)[1], maxsplit=1)[0]
    names: list[str] = []
    for declaration in re.sub(r"//.*|{}", "", body).split(";"):
        for part in re.sub(r" = [^,]*", "", declaration).split(","):
            names += part.split()[-1:]
    return [name for name in names if not name.startswith("unused")]


def enumerators(text: str, enum: str) -> dict[str, int]:
    """Name -> value of an enum class; without values, they count from 0."""
    found = re.search(rf"enum class {enum}\b[^{{]*{{([^}}]*)}}", text)
    assert found, f"no enum class {enum}"
    entries = re.findall(r"\b(k\w+)(?: = (\d+))?", re.sub(r"//.*", "", found[1]))
    return {name: int(value or index) for index, (name, value) in enumerate(entries)}


def test_every_magic_number_is_listed_with_its_value() -> None:
    listed = {int(value, 16) for value in re.findall(r"^\| `\w{4}` \| (0x\w+) \|", PAGE, re.M)}
    defined = {
        int(value, 16)
        for text in SOURCES.values()
        for value in re.findall(r"constexpr uint32_t k\w*Magic = (0x\w+);", text)
    }
    assert listed == defined


def test_the_store_s_operations_have_the_numbers_of_the_code() -> None:
    code = constants(source_with("namespace perseus::store_protocol {\n\nconstexpr"))
    listed = re.findall(r"(\d+) \((\w+)\)", production("op", "Finding each other"))
    names = {"kSet": "set", "kGet": "get", "kGetAll": "get_all", "kGetPresent": "get_present"}
    assert listed == [(str(code[constant]), name) for constant, name in names.items()]
    head = re.findall(r"(?:op|key_size):(\d+)", production("request", "Finding each other"))
    assert sum(map(int, head)) == code["kRequestHeader"]
    head = re.findall(r"(?:number|size):(\d+)", production("entry", "Finding each other"))
    assert sum(map(int, head)) == code["kEntryHeader"]
    text = source_with("namespace perseus::store_protocol {\n\nconstexpr")
    absent = re.search(r"kAbsent = (0x\w+);", text)
    gather = re.search(r"kGather = (\d+) \* kMillisecond;", text)
    assert absent and f"size {absent[1]} and no value" in PAGE
    assert gather and f"up to {gather[1]} ms" in PAGE


def test_the_handshake_has_the_sizes_of_the_code() -> None:
    code = constants(source_with("constexpr size_t kOpeningSize = "))
    assert size_of("opening", "Handshakes") == code["kOpeningSize"]
    head, numbers = production("opening", "Handshakes").split(" epoch:")
    assert sum(int(field.split(":")[1]) for field in head.split()) == code["kOpeningHead"]
    assert numbers.endswith(f"nonce:{code['kNonceSize']}")
    assert size_of("answer", "Handshakes") == code["kProofSize"]
    assert size_of("verdict", "Handshakes") == code["kProofSize"]


def test_control_messages_over_tcp_have_the_limit_of_the_code() -> None:
    code = constants(source_with("namespace perseus::tcp_protocol {\n\nconstexpr"))
    assert f"at most {code['kMaxControlText']} bytes" in PAGE


def test_messages_between_ranks_of_a_host_have_the_fields_of_the_code() -> None:
    text = source_with("struct ShmMessage {")
    size = constants(text)["kMaxControlText"]
    fields = [name.replace("kMaxControlText", str(size)) for name in fields_of("ShmMessage")]
    assert production("shm_message", "Handshakes").split() == fields
    numbers = re.findall(r"(\d+) \(", production("type", "Handshakes"))
    assert [int(n) for n in numbers] == list(enumerators(text, "ShmMessageType").values())


def test_frames_of_rounds_have_the_fields_of_the_code() -> None:
    assert production("frame", "Rounds").split() == fields_of("Frame")


def test_headers_of_exchanges_have_the_fields_of_the_code() -> None:
    assert production("header", "Exchanges").split() == fields_of("ExchangeHeader")
    assert "static_assert(sizeof(ExchangeHeader) == 64" in source_with("struct ExchangeHeader {")


def test_headers_of_sends_and_receives_have_the_fields_of_the_code() -> None:
    section = "Sends and receives"
    assert production("header", section).split() == fields_of("PointToPointHeader")
    text = source_with("struct PointToPointHeader {")
    assert "sizeof(PointToPointHeader) == 40" in text
    listed = re.findall(r"(\d) \((\w+)\)", production("type", section))
    types = enumerators(text, "PointToPointType")
    assert {f"k{name.capitalize()}": int(number) for number, name in listed} == types
    sizes = constants(text)
    assert f"up to {sizes['kMostEager']} bytes" in PAGE
    assert f"no more than {sizes['kMostHeld']} bytes" in PAGE
    assert "constexpr Channel kPointToPointChannel{UINT32_MAX, 0};" in text
    assert constants(source_with("kMaxMessage = "))["kMaxMessage"] == 256 * 1024


def test_every_collective_has_a_row() -> None:
    rows = " ".join(re.findall(r"^\| ([^|]*) \|", PAGE.split("\n## Exchanges\n", 1)[1], re.M))
    for name in enumerators(source_with("enum class Collective "), "Collective"):
        words = re.sub(r"(?<!^)([A-Z])", r"-\1", name[1:]).lower()
        assert words in rows, f"docs/protocol.md: no row for {words}"


def test_control_messages_begin_with_the_letters_of_the_code() -> None:
    letters = set(
        re.findall(r"constexpr char k\w+(?:PeerEvent|Message) = ('.')", "".join(SOURCES.values()))
    )
    section = "Channels and links"
    names = ("abort", "goodbye", "link", "await", "nccl", "unused")
    listed = {production(name, section).split()[0] for name in names}
    assert listed == letters


def test_a_chunk_has_the_size_of_the_code() -> None:
    size = constants(source_with("kChunkBytes = "))["kChunkBytes"]
    assert f"k-th chunk ({size // 1024} KiB)" in PAGE
