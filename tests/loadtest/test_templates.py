"""What is sent to servers without KServe: arrays in their places, in JSON and in text."""

import json

import numpy as np
import pytest

from asynctrt.errors import OptionsError, UsageError
from asynctrt.loadtest.templates import Template

ARRAYS = {
    "x": np.array([[1.5, 2.0]], np.float32),
    "text": np.array([b"gr\xc3\xbc\xc3\x9fe"]),
    "n": np.arange(3),
}


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ('{"inputs": "${x}"}', {"inputs": [[1.5, 2.0]]}),
        ('{"a": [{"row": "${x[0]}"}, "${n[2]}", 7, null]}', {"a": [{"row": [1.5, 2.0]}, 2, 7, None]}),
        ('{"prompt": "Say ${text}, ${n[1]} times"}', {"prompt": "Say grüße, 1 times"}),
        ('{"a": "${text[0]}"}', {"a": "grüße"}),
        ('{"a": "$5 {x} $x"}', {"a": "$5 {x} $x"}),
    ],
)
def test_places_in_json(text, filled):
    template = Template(text)
    assert template.is_json
    assert json.loads(template.fill(ARRAYS)) == filled


def test_what_nests_without_end_is_text():
    text = "[" * 10**5 + "${n[1]}"
    assert (Template(text).is_json, Template(text).fill(ARRAYS)) == (False, b"[" * 10**5 + b"1")


def test_text_that_is_no_json(tmp_path):
    template = Template("say ${text} ${x[0]}")
    assert (template.is_json, template.names) == (False, ("text", "x"))
    assert template.fill(ARRAYS).decode() == "say grüße [1.5, 2.0]"
    (tmp_path / "body.json").write_text('{"a": "${n}"}')
    assert Template(f"@{tmp_path / 'body.json'}").fill(ARRAYS) == b'{"a": [0, 1, 2]}'


@pytest.mark.parametrize(
    "content",
    [
        b'{"b":  1}',
        b'\xef\xbb\xbf{"a": 1}',
        b"--x\r\nContent-Type: image/png\r\n\r\n\x89PNG\xff\x00\r\n--x--\r\n",
        b"\xff\xfe ${x}",
        b"",
    ],
)
def test_a_file_without_places_is_sent_byte_by_byte(tmp_path, content):
    (tmp_path / "body").write_bytes(content)
    assert Template(f"@{tmp_path / 'body'}").fill(ARRAYS) == content


def test_what_is_around_the_places_stays_as_it_was_written():
    text = (
        '{"a":1e400, "b" : NaN,\r\n "id": 12345678901234567890, "a":2, "q": "\\"${n[1]}\\"", "x":"${x[0]}"}'
    )
    assert Template(text).fill(ARRAYS).decode() == text.replace('"${x[0]}"', "[1.5, 2.0]").replace(
        "${n[1]}", "1"
    )


def test_text_within_a_string_of_json_is_escaped():
    arrays = {"text": np.array([b'say "so"\n'])}
    filled = Template('{"prompt": "He: ${text}", "alone": "${text[0]}"}').fill(arrays)
    assert json.loads(filled) == {"prompt": 'He: say "so"\n', "alone": 'say "so"\n'}


def test_what_json_has_not_is_refused():
    with pytest.raises(OptionsError, match="NaN"):
        Template('{"a": "${x}"}').fill({"x": np.array([np.nan])})


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(OptionsError, match=r"names \$\{y\}, and the arrays are 'x', 'text', 'n'"):
        Template('{"a": "${y}"}').fill(ARRAYS)
    with pytest.raises(OptionsError, match="there are no arrays: set inputs"):
        Template("${y}").fill({})
    with pytest.raises(OptionsError, match=r"names \$\{x\[1\]\}, and 'x' has 1 row"):
        Template("${x[1]}").fill(ARRAYS)
    with pytest.raises(UsageError, match=r"the body '.*none' cannot be read"):
        Template(f"@{tmp_path / 'none'}")
