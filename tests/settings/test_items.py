"""The grammar of lists in settings and options: what was written is what is read, whatever the names."""

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recjax.errors import ConfigError
from recjax.settings import assignments, from_json, items, override, to_json
from recjax.settings.from_python import texts

NAME = st.text(st.sampled_from("ab1,:=|*<>!()[]{}\"' \n\té\0"), max_size=8) | st.text(max_size=5)


@dataclasses.dataclass(frozen=True)
class Options:
    columns: tuple[str, ...] = ()


def read(text):
    return [[items.unquote(part) for part in items.split(item, ":")] for item in items.split(text, ",")]


def write(parts):
    return ",".join(":".join(map(items.quote, item)) for item in parts)


@settings(max_examples=300)
@example([["a,b", "jagged"], ["(", ")"], ['"', '""', ""], ["'x'"], ["[a", "b]"]])
@given(st.lists(st.lists(NAME, min_size=1, max_size=4), min_size=1, max_size=4))
def test_names_come_back_whatever_they_are(parts):
    assert read(write(parts)) == parts


@settings(max_examples=200)
@given(st.lists(st.lists(NAME, min_size=2, max_size=3), max_size=4))
def test_a_setting_of_a_config_comes_back_from_the_command_line_from_python_and_from_json(parts):
    """An item of `columns` has a role behind its name, so it is never one quoted word."""
    columns = tuple(write([[name, *rest, "id"]]) for name, *rest in parts)
    config = override(Options(), [f"columns={','.join(columns)}"])
    assert config == Options(columns)
    assert override(Options(), assignments(config)) == config
    assert override(Options(), texts(columns=list(columns))) == config
    assert from_json(Options, to_json(config)) == config


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", [""]),
        ("a,b", ["a", "b"]),
        ('"a,b":jagged,price:dense', ['"a,b":jagged', "price:dense"]),
        ("hist:list(item,action(x,y),age),a", ["hist:list(item,action(x,y),age)", "a"]),
        ('hist:list("a)",b),c', ['hist:list("a)",b)', "c"]),
        ("x(,y", ["x(", "y"]),  # a parenthesis without a partner
        ("(x),y),z", ["(x)", "y)", "z"]),
        ('5" pipe,6" pipe', ['5" pipe', '6" pipe']),  # within a name
        ('say "hi", "a,b"', ['say "hi"', ' "a,b"']),
        ('a=","', ['a=","']),
    ],
)
def test_what_separates(text, parts):
    assert items.split(text, ",") == parts


@pytest.mark.parametrize(
    ("part", "name"),
    [("plain", "plain"), ('"a,b"', "a,b"), ('"say ""hi"""', 'say "hi"'), ('5" pipe', '5" pipe'), ('k="x:y"', "k=x:y")],
)
def test_what_a_part_means(part, name):
    assert items.unquote(part) == name


def test_only_what_needs_quotes_gets_them():
    for name in ("user", "user id", "größe", "a-b.c/d", "don't", "x"):
        assert items.quote(name) == name
    for name in ("", " a", "a ", "a,b", "a:b", 'a"b', "a=b", "a*b", "(a)", "[a]", "'a'", "a|b", "a<b", "!"):
        assert items.quote(name) == '"' + name.replace('"', '""') + '"'


@pytest.mark.parametrize("text", ['"a,b:jagged', 'a,"b', 'a:split="', '"""'])
def test_a_quote_that_is_not_closed_is_refused(text):
    with pytest.raises(ConfigError, match=r"a double quote opens before .* and is not closed"):
        override(Options(), [f"columns={text}"])


def test_lists_as_before():
    for text in ("user:id,price:dense", '["user:id", "price:dense"]', "('user:id','price:dense')"):
        assert override(Options(), [f"columns={text}"]) == Options(("user:id", "price:dense")), text
    assert items.names('user,,"a,b"') == ["user", "a,b"]


def test_a_long_text_takes_no_long():
    """A quadratic reader would take minutes."""
    for text in ('"a",' * 100_000, "(" * 300_000, "()" * 150_000, '5"' * 150_000, '"' + '""' * 150_000 + '"'):
        items.split(text, ",")
        items.unquote(text)
