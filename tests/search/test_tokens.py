"""Words: what a query finds in a text, where, and how that is shown."""

from __future__ import annotations

import os
import re
import sys
import time
import unicodedata
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byssus.errors import InputError
from byssus.search import tokens
from tests.support.quick import examples

RUNS = re.compile(f"[{tokens._RUNS}]")


def shown(query: str, text: str) -> str | None:
    found = tokens.parse(query).find(text)
    return None if found is None else tokens.snippet(found, ("[", "]"))


@pytest.mark.parametrize(
    ("query", "text", "snippet"),
    [
        # Chinese: from one character up, anywhere in a sentence.
        ("机", "我买了手机", "我买了手[机]"),
        ("手机", "我买了手机。", "我买了[手机]。"),
        ("买了手", "我买了手机", "我[买了手]机"),
        ("手机 我", "我买了手机", "[我]买了[手机]"),
        ("𠮷野", "𠮷野家", "[𠮷野]家"),
        # Japanese, Korean, Thai, Lao, Khmer, Burmese, bopomofo.
        ("京都", "東京都に住む", "東[京都]に住む"),
        ("すし", "おすしを食べる", "お[すし]を食べる"),
        ("ガラス", "ｶﾞﾗｽの靴", "[ｶﾞﾗｽ]の靴"),
        ("한국", "한국어를 배우다", "[한국]어를 배우다"),
        ("한국", unicodedata.normalize("NFD", "한국어"), unicodedata.normalize("NFD", "[한국]어")),
        ("ไทย", "ภาษาไทยยาก", "ภาษา[ไทย]ยาก"),
        ("ລາວ", "ພາສາລາວ", "ພາສາ[ລາວ]"),
        ("ខ្មែរ", "ភាសាខ្មែរ", "ភាសា[ខ្មែរ]"),
        ("မြန်မာ", "မြန်မာစာ", "[မြန်မာ]စာ"),
        ("ㄅㄆ", "ㄅㄆㄇ", "[ㄅㄆ]ㄇ"),
        # English: in all forms of a word, as whole words.
        ("run", "He was running", "He was [running]"),
        ("RUNNING", "she runs", "she [runs]"),
        ("universities", "a university", "a [university]"),
        # Accents, ligatures, and letters that become two.
        ("cafe", "Un café, s'il vous plaît", "Un [café], s'il vous plaît"),
        ("café", "UN CAFE", "UN [CAFE]"),
        ("naïve", "nai\u0308ve", "[nai\u0308ve]"),
        ("strasse", "Die Straße!", "Die [Straße]!"),
        ("find", "ﬁnd it", "[ﬁnd] it"),
        ("москва", "Москва́", "[Москва́]"),
        ("ΣΟΦΙΑ", "η σοφία", "η [σοφία]"),
        ("istanbul", "İstanbul", "[İstanbul]"),
        # Other scripts, with their vowel signs.
        ("हिन्दी", "मैं हिन्दी बोलता हूँ", "मैं [हिन्दी] बोलता हूँ"),
        ("שלום", "שלום עולם", "[שלום] עולם"),
        ("مرحبا", "قال مرحبا!", "قال [مرحبا]!"),
        # Code, numbers and marks, verified on the text.
        ("hello_world", "call hello_world()", "call [hello_world]()"),
        ("foo.bar", "see foo.bar.", "see [foo.bar]."),
        ("world", "hello_world", "hello_[world]"),
        ("100%", "it is 100% sure", "it is [100%] sure"),
        ("C++", "C and C++.", "C and [C++]."),
        ("3.14", "pi is 3.14", "pi is [3.14]"),
        ("ERR-42", "got err-42", "got [err-42]"),
        ("it's", "I think it\u2019s fine", "I think [it\u2019s] fine"),
        ("foo@example.com", "mail foo@example.com now", "mail [foo@example.com] now"),
        ("--help", "try x --help", "try x [--help]"),
        # Mixed.
        ("iPhone手机", "新的iPhone手机壳", "新的[iPhone手机]壳"),
        ("第3章", "看第3章吧", "看[第3章]吧"),
        ("3", "看第3章吧", "看第[3]章吧"),
        ("python", "用Python写代码", "用[Python]写代码"),
        # Phrases.
        ('"hello world"', "Hello, world!", "[Hello, world]!"),
        ('"test run"', "all tests running", "all [tests running]"),
        ('"你好 世界"', "你好 世界", "[你好 世界]"),
        ("\u201c你好\u201d", "说你好吧", "说[你好]吧"),
        ('"a b"', "a a b", "a [a b]"),
        ('"a.a b"', "a.a.a b", "a.[a.a b]"),
        ('"x -y"', "x -y", "[x -y]"),
        # Excluded.
        ("foo -bar", "foo baz", "[foo] baz"),
        ('foo -"bar baz"', "foo bar, and baz", "[foo] bar, and baz"),
        # Operators of others are text.
        ("foo OR bar", "foo or bar", "[foo] [or] [bar]"),
        ("(foo", "x (foo)", "x ([foo])"),
        ('"(foo"', "x (foo)", "x [(foo])"),
        ("weather, Berlin?", "Berlin: the weather", "[Berlin]: the [weather]"),
        ("北京\uff0c天气。", "天气 in 北京", "[天气] in [北京]"),
        ("「天气」", "天气", "[天气]"),
        ("1,000", "1,000", "[1,000]"),
        ("foo*", "foo* bar", "[foo*] bar"),
        ('"foo', 'say "foo', 'say ["foo]'),
        ("foo - bar", "foo - bar", "[foo] - [bar]"),
        ("a'; DROP TABLE messages; --", "a'; drop table messages; --", "[a]'; [drop] [table] [messages]; --"),
        # Emoji, NUL, lone surrogates.
        ("ok 👍🏽", "is ok 👍🏽", "is [ok] [👍🏽]"),
        ("b", "a\x00b", "a\x00[b]"),
        ("b", "\ud800b", "\ud800[b]"),
    ],
)
def test_a_query_finds(query: str, text: str, snippet: str) -> None:
    assert shown(query, text) == snippet


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("手机", "手 机"),
        ("运行", "动行"),
        ("カ", "ガラス"),
        ("run", "brunch"),
        ("world", "helloworld"),
        ("hello_world", "hello world"),
        ("hello_world", "hello_worlds"),
        ("hello_world", "xhello_world"),
        ("100%", "100 %"),
        ("100%", "2100%"),
        ("C++", "C"),
        ("iPhone手机", "MyiPhone手机"),
        ("iPhone手机", "iPhone 手机"),
        ('"hello world"', "world hello"),
        ('"hello world"', "hello big world"),
        ("foo -bar", "foo bars"),
        ('foo -"bar baz"', "foo bar baz"),
        ("foo -手", "foo 手机"),
        ("foo*", "food"),
        ("x =", "x \u2260"),
        ("w\u0435b", "web"),
    ],
)
def test_a_query_does_not_find(query: str, text: str) -> None:
    assert shown(query, text) is None


@pytest.mark.parametrize(
    "query", ["", "   ", "%", "_", "*", '"', '""', "-foo", '-"a b"', "!?", "\ud800", "👍", "-", "\0"]
)
def test_a_query_without_a_word_is_refused(query: str) -> None:
    with pytest.raises(InputError, match="needs a letter or a digit"):
        tokens.parse(query)


@pytest.mark.parametrize("query", [None, 7, b"foo", ["foo"]])
def test_a_query_is_text(query: object) -> None:
    with pytest.raises(InputError, match="is for text"):
        tokens.parse(query)


def test_queries_have_limits() -> None:
    with pytest.raises(InputError, match="up to 1,000 characters"):
        tokens.parse("x" * 1_001)
    with pytest.raises(InputError, match="up to 50 words"):
        tokens.parse("x " * 51)
    assert tokens.parse("x " * 50).find("x")
    assert tokens.parse("x" * 1_000).find("x" * 1_000)
    assert not tokens.parse("x" * 1_000).find("x" * 999)


def test_a_long_word_is_found_as_a_whole() -> None:
    long = "a1" * 500
    assert tokens.parse(long).find(f"see {long}")
    assert not tokens.parse(long).find(f"see {long}b")
    assert all(len(token) <= 64 for token in tokens.tokens(long)[0])


def test_the_tokens_of_a_text() -> None:
    assert tokens.tokens("Running 手机壳 x\uff0c手") == (["run", "手机", "机壳", "x"], sorted("手机壳"))
    assert tokens.tokens("") == ([], [])
    assert tokens.tokens("hello_world 100%")[0] == ["hello", "world", "100"]


def test_the_classes_of_characters_do_not_overlap() -> None:
    letter, mark = re.compile(tokens._LETTER), re.compile(f"[{tokens._MARKS}]")
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        if RUNS.match(character):
            assert not letter.match(character)
            assert not mark.match(character)
        assert character not in "\ue000\ue001" or not tokens._token.match(character)


# --- what an index may rely on ----------------------------------------------------------------------------------------

ALPHABET = "ab1你好世ガ한é\u0301ßİ_.-% \"\n'ｶﾞไ\U0001f44d𠮷ﬁक्\ud800"
texts = st.text(ALPHABET, max_size=12)


def has_chain(text: str, chain: list[str]) -> bool:
    sequence, singles = tokens.tokens(text)
    if len(chain) == 1:
        return chain[0] in sequence or chain[0] in singles
    return any(sequence[at : at + len(chain)] == chain for at in range(len(sequence)))


@settings(max_examples=examples(400), deadline=None)
@given(query=texts, before=texts, after=texts)
def test_what_matches_has_all_chains_of_the_query(query: str, before: str, after: str) -> None:
    try:
        matcher = tokens.parse(query)
    except InputError:
        return
    for text in (before + query + after, before + after, query):
        found = matcher.find(text)
        if found is not None:
            assert all(has_chain(text, chain) for chain in matcher.chains())


@settings(max_examples=examples(300), deadline=None)
@given(
    query=st.text("你好世界机ガ한국", min_size=1, max_size=4), text=st.text("你好世界机ガ한국ab \uff0c。1", max_size=20)
)
def test_chinese_japanese_and_korean_are_found_as_substrings(query: str, text: str) -> None:
    assert (tokens.parse(query).find(text) is not None) == (query in text)


@settings(max_examples=examples(300), deadline=None)
@given(
    text=st.text(ALPHABET + "\U0001f468\u200d\U0001f469", max_size=300), query=st.sampled_from(["a", "你", "1", "ガ"])
)
def test_a_snippet_is_a_part_of_the_text_and_shows_the_match(text: str, query: str) -> None:
    found = tokens.parse(query).find(text)
    if found is None:
        return
    snippet = tokens.snippet(found, ("\x01", "\x02"))
    assert "\x01" in snippet
    assert snippet.count("\x01") == snippet.count("\x02")
    for marked in re.findall("\x01(.*?)\x02", snippet, re.DOTALL):
        assert query in tokens.Folded(marked).text
    plain = snippet.replace("\x01", "").replace("\x02", "").strip("\u2026").strip()
    assert plain in re.sub(r"\s+", " ", text)


@settings(max_examples=examples(300), deadline=None)
@given(text=st.text(max_size=30))
def test_every_place_has_its_way_back(text: str) -> None:
    folded = tokens.Folded(text)
    last = 0
    for place in range(len(folded.text)):
        start, end = folded.original((place, place + 1))
        assert 0 <= start < end <= len(text)
        assert start >= last
        last = start
        assert folded.text[place] in tokens.Folded(text[start:end]).text


# --- phrases ----------------------------------------------------------------------------------------------------------

GAP = re.compile(rf"(?:(?![{tokens._RUNS}]|{tokens._LETTER}).)+", re.DOTALL)


def tried_at_each_place(phrase: str, text: str) -> Iterator[tuple[int, int]]:
    """Where a phrase is, found without any thought; places that overlap are left out."""
    folded, behind = tokens.Folded(text), 0
    first, *others = [tokens._Piece(piece) for piece in tokens.Folded(phrase).text.split()]
    for start, end in first.spans(folded):
        for piece in others:
            gap = (tokens._space if piece.is_spaced else GAP).match(folded.text, end)
            end = piece.at(folded, gap.end()) if gap else -1
            if end < 0:
                break
        if end >= 0 and start >= behind:
            behind = end
            yield start, end


@settings(max_examples=examples(1_000), deadline=None)
@given(
    phrase=st.lists(
        st.sampled_from(["a", "as", "b", ".", "..", "a.", ".a", "a.a", "手", "手机", "手.", "-", "e\u0301", "क्"])
    )
    .filter(lambda pieces: len(pieces) > 1)
    .map(" ".join),
    text=st.lists(
        st.sampled_from(["a", "as", "b", ".", "手", "机", " ", " ", "\n", "-", "_", "e\u0301", "क", "\u094d"]),
        max_size=40,
    ),
)
def test_a_phrase_is_found_where_trying_each_place_finds_it(phrase: str, text: list[str]) -> None:
    whole = "".join(text)
    found = list(tokens.Term(tokens.Folded(phrase).text).spans(tokens.Folded(whole)))
    assert found == list(tried_at_each_place(phrase, whole))


@pytest.mark.parametrize(
    ("phrase", "text"),
    [
        ("a " * 484 + "b", "a " * 200_000),
        ("a.a " * 240 + "b", "a.a " * 100_000),
        (". " * 484 + "b", ". " * 200_000),
        (". b", "." * 200_000),
        ("机 " * 484 + "器", "机 " * 200_000),
    ],
    ids=["words", "literals", "marks", "one gap", "runs"],
)
def test_a_phrase_that_almost_matches_everywhere_takes_no_longer_than_another(phrase: str, text: str) -> None:
    began = time.monotonic()
    text = f"{phrase.rsplit(maxsplit=1)[-1]} needle {text}"  # with all that the phrase has
    assert tokens.parse(f'needle -"{phrase}"').find(text) is not None
    assert tokens.parse(f'needle "{phrase}"').find(text) is None
    assert time.monotonic() - began < 20  # tried at each place, it would be minutes


# --- snippets ---------------------------------------------------------------------------------------------------------


def test_a_snippet_is_short_and_says_where_it_is_cut() -> None:
    snippet = shown("needle", "x " * 500 + "needle" + " y" * 500)
    assert snippet is not None
    assert len(snippet) < 130
    assert snippet.startswith("\u2026")
    assert "[needle]" in snippet
    assert snippet.endswith("\u2026")


def test_a_snippet_shows_where_most_terms_are() -> None:
    text = "red " + "x " * 200 + "red and blue" + " x" * 200 + " blue"
    assert "[red] and [blue]" in (shown("blue red", text) or "")


def test_a_snippet_cuts_no_family_in_two() -> None:
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    for shift in range(40):
        snippet = shown("needle", "x" * shift + " " + family * 8 + " needle " + family * 30)
        assert snippet is not None
        outside = snippet.strip("\u2026").replace(family, "")
        assert "\u200d" not in outside
        assert "\U0001f467" not in outside


def test_a_snippet_is_one_line() -> None:
    assert shown("b", "a\n\n\tb\r\nc") == "a [b] c"


# --- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.large
@pytest.mark.parametrize(
    "piece", ["hello wide world ", "你好世界\uff0c", "x" * 1_000 + " ", "cafe\u0301 ", "a" * 17, "\U0001f44d", "…"]
)
def test_a_million_characters_are_no_trouble(piece: str) -> None:
    text = piece * (1_000_000 // len(piece)) + " needle 针"
    assert tokens.tokens(text)[0][-1] == tokens.token_of("needle")
    for query in ("needle", "针", "needle_x"):
        found = tokens.parse(query).find(text)
        assert (found is not None) == ("_" not in query)
        assert found is None or "**" in tokens.snippet(found, ("**", "**"))


@pytest.mark.large
def test_a_text_that_repeats_the_query_is_no_trouble() -> None:
    found = tokens.parse('"ha ha" 哈哈').find("ha " * 300_000 + "哈" * 300_000)
    assert found is not None
    assert found.counts() == [1_000, 1_000]
    assert "**" in tokens.snippet(found, ("**", "**"))


def test_no_query_takes_long_to_read() -> None:
    """Vowel signs and letters of one script: a word that could be parted in very many ways."""
    for query in ("क" * 900 + "+", "अन्तर्राष्ट्रीयकरण" * 50 + "+", "তি" * 400 + "%"):
        assert tokens.parse(query).find(f"x {query} y") is not None


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_reads_queries_though_a_thread_of_its_parent_was_at_it() -> None:
    with tokens._stemming:
        child = os.fork()
        if child == 0:
            try:
                found = tokens.parse("unheardofwords").find("an unheardofword")
                os._exit(0 if found is not None else 1)
            finally:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
