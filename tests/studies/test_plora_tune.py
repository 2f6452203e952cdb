"""plora.tune on a user's model: from text to an adapter that PEFT loads, shown as it goes, and resumed where it was stopped."""

import io
import json
import re
import subprocess
import sys
from dataclasses import replace

import optuna
import pytest
import torch

from studies import plora
from studies.plora.adapter import Progress
from studies.plora.data.planted import synthetic
from studies.plora.data.tokens import Tokenizer
from studies.plora.search import display, tune as tuning
from studies.plora.search.driver import View
from suite.identity import ROOT
from tests.studies.plora_grid import adapter_of

SPACE = plora.Space(axes={"learning_rate": plora.Float(low=1e-3, high=5e-2, log=True), "rank": plora.Levels(values=(4, 8)), "batch": plora.Levels(values=(1, 2))}, fixed={"alpha_ratio": 2.0})
BUDGET = plora.Budget(trials=5, tokens=600, slots=3)


@pytest.fixture(autouse=True)
def no_storage_from_outside(monkeypatch):
    monkeypatch.delenv("OPTUNA_STORAGE", raising=False)


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers", reason="the user's model is a test dependency")

    torch.manual_seed(0)
    config = transformers.Qwen2Config(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def task():
    return synthetic(vocabulary=128, classes=4, rows=(64, 16, 16), tokens=(6, 12), seed=0)


@pytest.fixture(scope="module")
def tuned(model, task, tmp_path_factory):
    """One whole tuning, stopped by Ctrl-C in its midst and called again."""
    home, calls = tmp_path_factory.mktemp("tuning"), iter(range(1000))
    shown = display.Display.show

    def show(self, view):
        if next(calls) == 6:
            raise KeyboardInterrupt
        shown(self, view)

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OPTUNA_STORAGE", raising=False)
        patch.setattr(display.Display, "show", show)
        with pytest.raises(KeyboardInterrupt):
            plora.tune(model, task, SPACE, BUDGET, home=home, checkpoint_s=0.0)
    return plora.tune(model, task, SPACE, BUDGET, home=home, checkpoint_s=0.0, show=False)


def test_an_interrupted_tuning_goes_on_and_finds_what_an_unbroken_one_finds(tuned, model, task, tmp_path):
    unbroken = plora.tune(model, task, SPACE, BUDGET, home=tmp_path, show=False)
    assert tuned.trials == unbroken.trials and tuned.best == unbroken.best
    assert {t.state for t in tuned.trials} <= {"COMPLETE", "PRUNED"} and len(tuned.trials) == 5


def test_the_best_adapter_loads_with_peft_and_scores_what_was_found(tuned, model, task):
    PeftModel = pytest.importorskip("peft", reason="PEFT is a test dependency").PeftModel

    wrapped = PeftModel.from_pretrained(model, str(tuned.folder(tuned.best.number))).eval()
    right = 0
    with torch.no_grad():
        for ids, at, label in zip(task.validation.ids, task.validation.answer_from, task.validation.labels):
            logits = wrapped(torch.from_numpy(ids.astype("int64"))[None]).logits[0, int(at) - 1]
            right += int(logits[torch.from_numpy(task.validation.choices.astype("int64"))].argmax()) == int(label)
    wrapped.unload()
    assert right / len(task.validation.ids) == pytest.approx(tuned.best.score, abs=1e-6)


def test_every_finished_trial_has_a_folder_and_twins_share_it(tuned):
    for trial in tuned.trials:
        if trial.state == "COMPLETE":
            assert {p.name for p in tuned.folder(trial.number).iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        else:
            with pytest.raises(ValueError, match=f"got trial {trial.number}, which is PRUNED"):
                tuned.folder(trial.number)


def test_optuna_opens_the_journal_that_tuning_leaves(tuned):
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tuned.journal)))
    (summary,) = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    assert study.best_value == tuned.best.score and len(study.trials) == 5


def test_a_home_of_another_model_task_or_budget_is_another_search(tuned, model, task):
    more = plora.tune(model, replace(task, name="other"), SPACE, replace(BUDGET, trials=1), home=tuned.home, show=False)
    assert len(more.trials) == 1 and more.journal != tuned.journal


# ---------------------------------------------------------------- what a person sees


def view(**changes):
    adapter = adapter_of({"learning_rate_level": 2, "rank_level": 1, "batch_level": 0, "alpha_ratio_level": 0})
    live = {0: (7, Progress(adapter=adapter, tokens_seen=10_000, optimizer_steps=9, loss=1.25)), 2: (9, Progress(adapter=adapter, tokens_seen=0, optimizer_steps=0, loss=float("nan")))}
    return View(**{**dict(cycle=3, seconds=12.5, slots=3, live=live, scores={7: 0.5}, finished=1, pruned=4, refilled=5, trials=10, budget=24, best=(2, 0.75), repeating=False), **changes})


def test_every_slot_has_a_row_and_free_ones_say_so():
    rows = display.rows_of(view())
    assert rows[0] == ("0", "7", "16", "16", "8e-05", "1", "█████░░░░░  50%", "1.2500", "0.5000")
    assert rows[1][:2] == ("1", "-") and "free" in rows[1]
    assert rows[2][:2] == ("2", "9") and rows[2][-2:] == ("", "") and len({len(r) for r in rows}) == 1
    table = display.table_of(view())
    assert table.row_count == 3 and table.caption == display.summary_of(view())


def test_the_summary_says_what_was_pruned_and_refilled():
    assert display.summary_of(view()) == "1 finished, 4 pruned, 2 of 3 slots live, 5 refilled, 10 of 24 asked, 12.5 device-s, best 0.7500 (trial 2)"
    assert display.summary_of(view(best=None, repeating=True)).endswith("best none yet, repeating what a kill took")


def test_off_a_terminal_a_line_is_printed_when_a_trial_ends_and_not_else():
    stream = io.StringIO()
    with display.Display(stream=stream) as shown:
        for pruned in (4, 4, 5, 5):
            shown.show(view(pruned=pruned))
    assert [line.split(",")[1] for line in stream.getvalue().splitlines()] == [" 4 pruned", " 5 pruned"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_a_live_table_is_drawn_and_taken_down(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with display.Display(stream=stream) as shown:
        shown.show(view())
        shown.live.refresh()
    assert "live adapters" in stream.getvalue() and "8e-05" in stream.getvalue() and "refilled" in re.sub(r"\s+", " ", stream.getvalue())


# ---------------------------------------------------------------- a user's rows, and what is refused


LETTERS = Tokenizer(name="letters", encode=lambda text: [ord(c) % 128 for c in text], end=0)


def test_pairs_become_a_stratified_task_without_a_row_in_two_parts():
    rows = [(f"prompt {i}", "ab"[i % 2] + "x") for i in range(40)]
    task = plora.from_pairs(rows, LETTERS, tokens=32, classes=True, validation=0.2, test=0.1)
    assert [len(p) for p in task.parts] == [28, 8, 4] and task.classes == 2
    assert [sorted(p.labels.tolist()).count(0) for p in task.parts] == [14, 4, 2]
    seen = [bytes(ids[:-1].tolist()).decode() for part in task.parts for ids in part.ids]
    assert sorted(seen) == sorted(prompt for prompt, _ in rows)
    assert plora.from_pairs(rows, LETTERS, tokens=32, seed=1).classes == 0


@pytest.mark.parametrize("bad", [{"validation": 0.0}, {"validation": 0.6, "test": 0.5}])
def test_shares_that_leave_nothing_are_refused(bad):
    with pytest.raises(ValueError, match="got validation="):
        plora.from_pairs([("a", "b")] * 9, LETTERS, tokens=8, **bad)
    with pytest.raises(ValueError, match="each part has at least one row"):
        plora.from_pairs([("a", "b")] * 2, LETTERS, tokens=8)


@pytest.mark.parametrize("bad", [{"trials": 0}, {"tokens": 0}, {"slots": 0}])
def test_an_empty_budget_is_refused(bad):
    with pytest.raises(ValueError, match="at least 1"):
        plora.Budget(**{"trials": 1, "tokens": 1, **bad})


@pytest.mark.parametrize(
    ("axes", "fixed", "rule"),
    [
        ({"rank": plora.Levels(values=(8, 16))}, {}, "each of .* is searched or fixed"),
        ({"rank": plora.Levels(values=(8, 256))}, {"alpha_ratio": 1.0, "learning_rate": 1e-4, "batch": 1}, "a rank is from 1 to 128"),
        ({"speed": plora.Levels(values=(8, 16))}, {}, "an axis is one of"),
        ({}, {"rank": 8, "alpha_ratio": 1.0, "learning_rate": 1e-4, "batch": 1}, "at least one axis"),
    ],
)
def test_a_wrong_space_is_refused_before_anything_is_trained(axes, fixed, rule):
    with pytest.raises(ValueError, match=rule):
        plora.Space(axes=axes, fixed=fixed)
    with pytest.raises(ValueError, match="rising order"):
        plora.Levels(values=(16, 8))


def test_looks_divide_the_closest_rungs(task):
    mean = float(task.train.lengths.mean())
    assert tuning.looks_of(task, 10_000, plora.Halving(shares=(0.125, 0.25, 0.5))) == int(1250 / 4 / mean)
    assert tuning.looks_of(task, 10, plora.NO_PRUNING) == 1


def test_the_readme_s_example_runs_as_it_stands(model, tmp_path, monkeypatch, capsys):
    """On a two-layer model, letters for tokens and 90 rows; nothing else of it is changed but the sizes of the budget."""
    transformers = pytest.importorskip("transformers", reason="the user's model is a test dependency")
    code = re.search(r"```python\n(.*?)```", (ROOT / "studies/plora/README.md").read_text(), re.DOTALL)[1]
    assert len(code.splitlines()) <= 15
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_: LETTERS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps([f"is {i} odd?", ("no", "yes")[i % 2]]) + "\n" for i in range(90)))
    small = code.replace("tokens=64,", "tokens=16,").replace("trials=64, tokens=200_000, slots=16", "trials=3, tokens=300, slots=2").replace("(8, 16, 32, 64)", "(8, 16)")
    assert small.count("tokens=16") == small.count("tokens=300") == small.count("values=(8, 16)") == 1
    exec(compile(small, "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert "AdapterConfig(rank=" in said and "tuning/adapters/trial-000" in said and "1 finished" in said


def test_importing_the_library_is_light():
    code = "import sys; from studies import plora; plora.AdapterConfig, plora.PAPER; print([m for m in ('torch', 'optuna', 'transformers', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
