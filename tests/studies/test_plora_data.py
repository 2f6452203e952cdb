"""Tasks: rows with an answer, parts that do not overlap, one answer token a class, refusals with counts, and a task that can be learnt.

Readers are tried on small files of each set's format; where the real files are at hand (SUITE_DATA or the cache), the last block of tests
exists too and says what they hold. Tolerances
- SHARE  each class's share of a stratified part is exact up to one row (largest remainders).
- NOISE  wrong answers are drawn with probability p: the count of n rows lies within 5 standard deviations, sqrt(n p (1 - p)).
"""

import hashlib
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from studies.plora.data.lengths import NAMES, draw, histogram, lengths
from studies.plora.data.planted import synthetic
from studies.plora.data.sets import ASSETS as SET_ASSETS, SETS, load_task, tokenize
from studies.plora.data.sources import Source
from studies.plora.data.split import held_out, subset
from studies.plora.data.task import Examples, Task
from studies.plora.data.tokens import Tokenizer, class_tokens, encode_answers, encode_classes, fitting, from_huggingface
from suite.assets import ASSETS, AssetError, find_asset, get_asset, load as load_asset

SHARE_ROWS = 1.0
NOISE_SIGMAS = 5.0


def here(*names):
    return all(find_asset(get_asset(name)) is not None for name in names)


def letters() -> Tokenizer:
    """One token a word, a word of more than six letters is two; ids in the order of first sight."""
    seen: dict[str, int] = {}

    def encode(text: str) -> list[int]:
        parts = [p for word in text.split() for p in ((word,) if len(word) <= 6 else (word[:6], word[6:]))]
        return [seen.setdefault(p, len(seen)) for p in parts]

    return Tokenizer(name="letters", encode=encode, end=999)


def rows(*ids, answer_from, **kwargs):
    return Examples(ids=tuple(np.array(r, np.int32) for r in ids), answer_from=np.array(answer_from, np.int32), **kwargs)


# ---------------------------------------------------------------- examples


def test_examples_know_their_lengths_and_answers():
    part = rows([1, 2, 3], [4, 5], answer_from=[1, 1])
    assert part.lengths.tolist() == [3, 2] and part.answer_tokens.tolist() == [2, 1] and len(part) == 2
    assert part.take(np.array([1])).ids[0].tolist() == [4, 5]


@pytest.mark.parametrize(
    ("kwargs", "rule"),
    [
        ({"ids": [[1, 2]], "answer_from": [0]}, "one prompt token and one answer token, got 1"),
        ({"ids": [[1, 2], [3]], "answer_from": [1, 1]}, "got 1 that have not, first row 1"),
        ({"ids": [[1, -1]], "answer_from": [1]}, "not negative"),
        ({"ids": [[1, 2]], "answer_from": [1], "labels": [0]}, "labels with choices or neither"),
        ({"ids": [[1, 2]], "answer_from": [1], "labels": [0], "choices": [2, 2]}, "answer token of its own"),
        ({"ids": [[1, 2]], "answer_from": [1], "labels": [1], "choices": [2]}, "labels lie below the 1 classes"),
        ({"ids": [[1, 3]], "answer_from": [1], "labels": [0], "choices": [2]}, "the class's one token"),
        ({"ids": [[1, 2, 2]], "answer_from": [1], "labels": [0], "choices": [2]}, "the class's one token"),
        ({"ids": [], "answer_from": []}, "at least one row"),
    ],
)
def test_examples_that_no_engine_could_train_on_are_refused_with_the_rule(kwargs, rule):
    arrays = {k: np.array(v, np.int32) for k, v in kwargs.items() if k != "ids"}
    with pytest.raises(ValueError, match=rule):
        Examples(ids=tuple(np.array(r, np.int32) for r in kwargs["ids"]), **arrays)


def test_ids_of_another_type_are_refused():
    with pytest.raises(ValueError, match="int32, got .*int64"):
        Examples(ids=(np.array([1, 2]),), answer_from=np.array([1], np.int32))


def test_parts_of_a_task_have_the_same_classes():
    one = rows([1, 2], answer_from=[1], labels=np.array([0], np.int32), choices=np.array([2, 3], np.int32))
    other = rows([1, 3], answer_from=[1], labels=np.array([0], np.int32), choices=np.array([3, 2], np.int32))
    with pytest.raises(ValueError, match="different choices in mixed"):
        Task(train=one, validation=one, test=other, name="mixed", citation="-")
    task = Task(train=one, validation=one, test=one, name="same", citation="-")
    assert (task.classes, task.longest, task.largest_id) == (2, 2, 3)  # 3 is a class that no row has


# ---------------------------------------------------------------- the planted task


def test_the_planted_answer_is_a_function_of_the_last_prompt_token_alone():
    task = synthetic(vocabulary=64, classes=8, seed=5)
    for part in task.parts:
        marker = np.array([row[-2] for row in part.ids])
        assert (part.labels == marker - 8).all() and set(part.labels.tolist()) == set(range(8))
        assert all((row[:-2] >= 16).all() for row in part.ids)  # noise is neither a marker nor an answer
        assert part.lengths.min() >= 6 and part.lengths.max() <= 24


def test_wrong_answers_stand_in_the_training_rows_alone_at_their_rate():
    rows_, p = 4000, 0.2
    task = synthetic(vocabulary=64, classes=4, seed=1, rows=(rows_, 100, 100), wrong=p)
    wrong = [int((part.labels != np.array([row[-2] - 4 for row in part.ids])).sum()) for part in task.parts]
    assert abs(wrong[0] - rows_ * p) <= NOISE_SIGMAS * math.sqrt(rows_ * p * (1 - p)) and wrong[1:] == [0, 0]


def test_a_planted_task_is_its_seed_s():
    same, again, other = (synthetic(vocabulary=64, seed=s) for s in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(same.train.ids, again.train.ids, strict=True))
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(same.train.ids, other.train.ids, strict=True))
    # known rows: another machine must make these
    assert [row[-2:].tolist() for row in synthetic(vocabulary=64, seed=0, rows=(4, 1, 1)).train.ids] == KNOWN


KNOWN = [[9, 1], [10, 2], [11, 3], [8, 0]]


def test_without_classes_the_planted_answer_is_three_tokens_that_the_marker_sets():
    task = synthetic(vocabulary=64, classes=0, seed=2)
    assert task.classes == 0 and task.train.labels is None and (task.train.answer_tokens == 3).all()
    assert all([(row[-4] - 8 + j) % 8 for j in range(3)] == row[-3:].tolist() for row in task.train.ids)


@pytest.mark.parametrize("change", [{"vocabulary": 16}, {"tokens": (1, 4)}, {"rows": (0, 1, 1)}, {"wrong": 1.0}, {"classes": -1}])
def test_a_planted_task_that_cannot_be_is_refused(change):
    with pytest.raises(ValueError, match="got "):
        synthetic(**{"vocabulary": 64, "classes": 8, "seed": 0, **change})


# ---------------------------------------------------------------- splits


@pytest.mark.parametrize("count", [1, 7, 50, 199])
def test_a_stratified_part_has_each_class_by_its_share(count):
    labels = np.repeat([0, 1, 2], [120, 60, 20])
    drawn = subset(labels, count, seed=3)
    assert len(drawn) == len(set(drawn.tolist())) == count
    for c, size in zip(*np.unique(labels, return_counts=True), strict=True):
        assert abs((labels[drawn] == c).sum() - size * count / 200) < SHARE_ROWS


def test_held_out_rows_and_the_others_are_all_rows_once():
    labels = np.arange(90) % 3
    others, drawn = held_out(labels, 30, seed=0)
    assert sorted([*others, *drawn]) == list(range(90))
    assert subset(labels, 30, seed=0).tolist() == drawn.tolist() != subset(labels, 30, seed=1).tolist()
    with pytest.raises(ValueError, match="from 1 to 90 rows"):
        subset(labels, 91, seed=0)
    with pytest.raises(ValueError, match="some rows remain"):
        held_out(labels, 90, seed=0)


# ---------------------------------------------------------------- tokens


def test_every_class_gets_a_token_of_its_own_even_where_greed_would_fail():
    # "a" alone can only have "a"; a greedy choice in this order would have given it to "a_b" before
    names = ("a_b", "a", "b_c")
    tokens = class_tokens(names, letters())
    assert len(set(tokens.tolist())) == 3 and tokens.dtype == np.int32
    with pytest.raises(ValueError, match=r"none left for \['a_a_a'\]|none left"):
        class_tokens(("1", "1_1", "1_1_1"), letters())


def test_a_row_with_a_class_ends_with_the_class_s_token():
    tok = letters()
    choices = class_tokens(("yes", "no"), tok)
    part = encode_classes([("is it", "no"), ("was it so", "yes")], ("yes", "no"), choices, tok)
    assert part.labels.tolist() == [1, 0] and [int(row[-1]) for row in part.ids] == choices[[1, 0]].tolist()
    with pytest.raises(ValueError, match=r"got \['perhaps'\]"):
        encode_classes([("x", "perhaps")], ("yes", "no"), choices, tok)


def test_answers_begin_after_the_prompt_and_end_with_the_end_token():
    tok = letters()
    assert tok.encode("one two three") == [0, 1, 2]
    part = encode_answers([("one two", "three")], Tokenizer(name="b", encode=tok.encode, begin=(7,), end=999))
    assert part.ids[0].tolist() == [7, 0, 1, 2, 999] and part.answer_from.tolist() == [3]


def test_empty_prompts_and_answers_are_refused_with_their_count():
    with pytest.raises(ValueError, match="an answer, got 2 of 3"):
        encode_answers([("a", " "), ("b", ""), ("c", "d")], letters())
    with pytest.raises(ValueError, match="a prompt, got 1 of 2"):
        encode_answers([("  ", "x"), ("c", "d")], letters())


def source(*prompts):
    some = [(p, "yes") for p in prompts]
    return Source(name="toy", citation="-", classes=("yes", "no"), train=some, validation=some[:1], test=some[:1])


def test_rows_that_are_too_long_are_refused_or_dropped_and_counted():
    long = source("a b", "a b c d", "a b c d e")
    with pytest.raises(ValueError, match="at most 4 tokens, got 2 of 3 rows of toy, train that are longer, the longest 6; raise tokens or pass drop_longer"):
        tokenize(long, tokens=4, tokenizer=letters())
    task = tokenize(long, tokens=4, tokenizer=letters(), drop_longer=True)
    assert task.dropped == {"train": 2, "validation": 0, "test": 0} and len(task.train) == 1 and task.longest == 3
    assert tokenize(long, tokens=6, tokenizer=letters()).dropped == {"train": 0, "validation": 0, "test": 0}
    with pytest.raises(ValueError, match="got 1 of 1 rows of x"):
        fitting(rows([1, 2, 3], answer_from=[1]), 2, what="x", drop_longer=True)  # nothing would be left


def test_subsets_are_drawn_by_class():
    some = [(f"w{i}", "yes" if i % 4 else "no") for i in range(40)]
    task = tokenize(Source(name="t", citation="-", classes=("yes", "no"), train=some, validation=some, test=some), tokens=8, tokenizer=letters(), rows=(8, 4, None))
    assert [len(p) for p in task.parts] == [8, 4, 40] and (task.train.labels == 1).sum() == 2


class HuggingFaceLike:
    """What of a transformers tokenizer is asked: ids of "" tell whether a begin token leads."""

    def __init__(self, leads, bos):
        self.leads, self.bos_token_id, self.eos_token_id = leads, bos, 2

    def __call__(self, text):
        return type("Encoded", (), {"input_ids": [1] if self.leads else []})()

    def encode(self, text, add_special_tokens):
        assert add_special_tokens is False
        return [len(text)]


@pytest.mark.parametrize(("leads", "bos", "begin"), [(True, 1, (1,)), (False, 1, ()), (False, None, ())])
def test_a_user_s_tokenizer_keeps_its_begin_token_where_it_sets_one(leads, bos, begin):
    tok = from_huggingface(HuggingFaceLike(leads, bos))
    assert tok.begin == begin and tok.end == 2
    assert encode_answers([("abc", "d")], tok).ids[0].tolist() == [*begin, 3, 2, 2]


# ---------------------------------------------------------------- lengths


def test_lengths_are_those_of_the_training_rows():
    assert [len(lengths(n)) for n in NAMES] == [7473, 4076] and (np.diff(lengths("gsm8k")) >= 0).all()
    drawn = draw("gsm8k", 4000, seed=0, most=512)
    pool = lengths("gsm8k")[lengths("gsm8k") <= 512]
    assert drawn.max() <= 512 and abs(drawn.mean() - pool.mean()) <= NOISE_SIGMAS * pool.std() / math.sqrt(4000)
    assert (draw("mrpc", 9, seed=1) == draw("mrpc", 9, seed=1)).all() and (draw("mrpc", 9, seed=1) != draw("mrpc", 9, seed=2)).any()
    with pytest.raises(ValueError, match="got name='cola'"):
        lengths("cola")
    with pytest.raises(ValueError, match="most=5"):
        draw("mrpc", 1, seed=0, most=5)


# ---------------------------------------------------------------- the real sets


def test_a_set_names_assets_of_the_catalogue():
    assert set(SET_ASSETS) == set(SETS) and {a for names in SET_ASSETS.values() for a in names} <= set(ASSETS)
    with pytest.raises(ValueError, match="got name='imdb'"):
        load_task("imdb", tokens=64)


FILES = {  # a few rows of each set as its authors write them: quotes, a comma, a line break in a field, a byte order mark, a number with a fraction
    "banking77-train": ("text/banking77/train.csv", 'text,category\n"Where, is it?",card_arrival\nWhy,card_linking\n' + "".join(f"q{i},{c}\n" for i in range(20) for c in ("card_arrival", "card_linking"))),
    "banking77-test": ("text/banking77/test.csv", 'text,category\n"two\nlines",card_linking\n'),
    "clinc150": ("text/clinc150/data_full.json", '{"train": [["a", "yes"], ["b", "no"]], "val": [["c", "no"]], "test": [["d", "yes"]], "oos_test": [["e", "oos"]]}'),
    "mawps-asdiv": ("text/svamp/mawps_asdiv_train.csv", "Question,Numbers,Equation,Answer,group_nums,Body,Ques\n" + "is number1 more than number0 ?,2.0 3.5,x,1.5,[],b,q\n" * 301),
    "svamp": ("text/svamp/SVAMP.json", '[{"Body": "Dan had $ 3.", "Question": "How many?", "Answer": 3.0}]'),
    "mrpc-train": ("text/mrpc/msr_paraphrase_train.txt", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n" + '1\t1\t2\tHe "said.\tHe.\n0\t3\t4\tOne\u2028line\tTwo\n' * 201),
    "mrpc-test": ("text/mrpc/msr_paraphrase_test.txt", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\ta\tb\n"),
    "cola-train": ("text/cola/in_domain_train.tsv", "gj04\t1\t\tFine.\ngj04\t0\t*\tNot fine.\n" * 201),
    "cola-dev": ("text/cola/in_domain_dev.tsv", "gj04\t0\t*\tNo.\n"),
    "sst2-train": ("text/sst2/train.tsv", "good\t1\nbad\t0"),
    "sst2-dev": ("text/sst2/dev.tsv", "good\t1"),
    "sst2-test": ("text/sst2/test.tsv", "bad\t0"),
    "gsm8k-train": ("text/gsm8k/train.jsonl", '{"question": "How many?", "answer": "1+1=2\\n#### 2"}\n' * 501),
    "gsm8k": ("text/gsm8k/test.jsonl", '{"question": "And now?", "answer": "#### 5"}\n'),
}


@pytest.fixture
def small_files(tmp_path, monkeypatch):
    for name, (path, content) in FILES.items():
        file, raw = tmp_path / path, content.encode()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(raw)
        monkeypatch.setitem(ASSETS, name, replace(ASSETS[name], sha256=hashlib.sha256(raw).hexdigest(), size_bytes=len(raw)))
    monkeypatch.setenv("SUITE_DATA", str(tmp_path))
    return tmp_path


READ = [  # set; rows of the three parts; first test row; classes
    ("banking77", None, ("Query: two\nlines\nIntent:", "card_linking"), 2),
    ("clinc150", (2, 1, 1), ("Query: d\nIntent:", "yes"), 2),
    ("gsm8k", (1, 500, 1), ("Question: And now?\nAnswer:", "#### 5"), 0),
    ("svamp", (1, 300, 1), ("Question: Dan had $ 3. How many?\nAnswer:", "3"), 0),
    ("mrpc", (2, 400, 1), ("First: a\nSecond: b\nDo both say the same?", "no"), 2),
    ("cola", (2, 400, 1), ("Sentence: No.\nIs this sentence acceptable English?", "no"), 2),
    ("sst2", (2, 1, 1), ("Review: bad\nIs it positive?", "no"), 2),
]


@pytest.mark.parametrize(("name", "sizes", "first", "classes"), READ)
def test_each_set_is_read_as_its_authors_wrote_it(name, sizes, first, classes, small_files, monkeypatch):
    monkeypatch.setattr("studies.plora.data.banking.VALIDATION_ROWS", 10)
    source = SETS[name](0)
    assert source.test[0] == first and len(source.classes) == classes
    assert sizes is None or tuple(len(p) for p in (source.train, source.validation, source.test)) == sizes
    assert not classes or {c for _, c in source.train} <= set(source.classes)


def test_fields_with_quotes_line_breaks_and_placeholders_are_whole(small_files):
    assert ("Where, is it?", "card_arrival") in load_asset("banking77-train")
    assert load_asset("mawps-asdiv")[0] == ("is 3.5 more than 2 ?", "1.5")
    assert load_asset("mrpc-train")[1] == ("One\u2028line", "Two", "0") and load_asset("mrpc-train")[0][0] == 'He "said.'
    assert load_asset("clinc150")["oos_test"] == (("e", "oos"),)


@pytest.mark.parametrize(
    ("name", "content"),
    [("banking77-test", "query,intent\na,b\n"), ("mrpc-test", "Quality\n1\t2\n"), ("svamp", '[{"Body": 1}]'), ("clinc150", '{"train": [["a"]]}'), ("mawps-asdiv", "Question,Numbers,Answer\nnumber4,1.0,1\n")],
)
def test_a_file_without_its_rows_is_one_line_that_names_the_asset(name, content, small_files, monkeypatch):
    (small_files / FILES[name][0]).write_text(content)
    monkeypatch.setitem(ASSETS, name, replace(ASSETS[name], sha256=hashlib.sha256(content.encode()).hexdigest(), size_bytes=len(content)))
    with pytest.raises(AssetError, match=f"asset {name}: .*does not have the rows it should") as error:
        load_asset(name)
    assert "\n" not in str(error.value)


def test_what_reads_the_sets_is_in_the_digest_of_the_cells_that_train_on_them(small_files):
    """A worker refuses a cell that loads first-party code outside its digest."""
    code = """
import dataclasses, hashlib, sys
from suite.identity import FIRST_PARTY, reached_modules
from suite.assets import ASSETS
from studies.plora.data import banking, sets
for name, asset in list(ASSETS.items()):
    if path := asset.sources[0].find():
        ASSETS[name] = dataclasses.replace(asset, sha256=hashlib.sha256(path.read_bytes()).hexdigest(), size_bytes=path.stat().st_size)
banking.VALIDATION_ROWS = 10
for read in sets.SETS.values():
    read(0)
first = {n for n, m in sys.modules.items() if n.split(".")[0] in FIRST_PARTY and not (getattr(m, "__file__", "") or "").endswith("__init__.py")}
print(sorted(first - reached_modules("studies.plora.measures.grid") - {"suite.identity"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr[-400:]


if here("smollm2-135m-instruct-bf16", *(name for names in SET_ASSETS.values() for name in names)):

    REPEATS = {"banking77": 0, "clinc150": 1}  # validation rows that are training rows too, class and all: the authors' own
    REAL = [("banking77", (9233, 770, 3080), 77), ("clinc150", (15000, 3000, 4500), 150)]

    @pytest.mark.parametrize(("name", "sizes", "classes"), REAL)
    def test_a_real_set_has_its_rows_and_parts_that_share_none(name, sizes, classes):
        whole = SETS[name](0)
        assert (tuple(len(p) for p in (whole.train, whole.validation, whole.test)), len(whole.classes)) == (sizes, classes)
        assert len(set(whole.validation) & set(whole.train)) == REPEATS[name]
        task = load_task(name, tokens=128, rows=(1000, 200, 200))
        assert [len(p) for p in task.parts] == [1000, 200, 200] and task.classes == classes
        assert 12 < task.train.lengths.mean() < 24  # tokens: a customer's question with its frame and answer
        with pytest.raises(ValueError, match=f"the longest {task.train.lengths.max()}"):
            load_task(name, tokens=int(task.train.lengths.max()) - 1, rows=(1000, 200, 200))

    def test_problems_are_judged_by_their_answers():
        tok_rows = (40, 20, 20)
        gsm8k, svamp = load_task("gsm8k", tokens=640, rows=tok_rows), load_task("svamp", tokens=160, rows=tok_rows)
        assert gsm8k.classes == svamp.classes == 0
        assert gsm8k.train.answer_tokens.mean() > 40 > 8 > svamp.test.answer_tokens.mean() >= 2  # a worked answer; a number and its end

    def test_the_stored_lengths_are_those_that_the_set_gives():
        counted = histogram("mrpc")
        assert np.repeat([int(k) for k in counted], list(counted.values())).tolist() == lengths("mrpc").tolist()
