"""The demo: its documents, questions, arithmetic and output; the whole of it with the real models (slow)."""

from __future__ import annotations

import json

import pytest
from langchain_core.documents import Document

from kvboost_rag import PromptError
from langchain_kvboost.demo import cli
from langchain_kvboost.demo.compare import Answer, Row, reorder, summarise
from langchain_kvboost.demo.documents import load_passages, module_document, write_python_documents
from langchain_kvboost.demo.questions import ABOUT_PYTHON, questions_about, read_questions
from langchain_kvboost.demo.report import print_row, print_table


def about_tokens(text: str) -> int:
    return len(text) // 4


class TestDocuments:
    def test_python_has_sixty_passages_and_they_are_the_same_twice(self, tmp_path):
        first = load_passages(write_python_documents(tmp_path / "a"), about_tokens)
        second = load_passages(write_python_documents(tmp_path / "b"), about_tokens)
        assert [p.page_content for p in first] == [p.page_content for p in second]
        assert len(first) >= 60
        lengths = sorted(about_tokens(p.page_content) for p in first)
        assert lengths[-1] <= 280
        assert lengths[len(lengths) // 2] >= 140
        assert "PSF" in (tmp_path / "a" / "LICENCE").read_text()

    def test_stale_files_go(self, tmp_path):
        (tmp_path / "old.md").write_text("old")
        write_python_documents(tmp_path)
        assert not (tmp_path / "old.md").exists()

    def test_interpreter_sessions_are_left_out(self):
        import textwrap

        text = module_document(textwrap)
        assert "## textwrap.dedent" in text
        assert ">>>" not in text

    def test_module_without_documentation_gives_nothing(self):
        assert module_document(type(json)("empty")) == ""

    def test_folder_of_text_and_markdown(self, tmp_path):
        (tmp_path / "b.md").write_text("# Second\n\n" + "word " * 600)
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "a.TXT").write_bytes(b"broken \xff utf-8")
        (tmp_path / "picture.png").write_bytes(b"\x89PNG")
        passages = load_passages(tmp_path, about_tokens)
        assert {p.metadata["source"] for p in passages} == {"b.md", "a.TXT"}
        assert len(passages) > 2

    def test_bad_folders(self, tmp_path):
        with pytest.raises(PromptError, match="not a folder"):
            load_passages(tmp_path / "none", about_tokens)
        (tmp_path / "a.txt").write_text(" \n")
        with pytest.raises(PromptError, match="1 such files"):
            load_passages(tmp_path, about_tokens)


class TestQuestions:
    def test_eight_of_each(self):
        assert len(ABOUT_PYTHON) == 8
        for passages in (1, 5, 8, 100):
            documents = [Document(page_content=f"# Title {n}\n\nText.") for n in range(passages)]
            questions = questions_about(documents)
            assert len(questions) == 8
            assert len(set(questions)) == min(passages, 8)
            assert 'about "Title 0 Text"?' in questions[0]

    def test_file(self, tmp_path):
        file = tmp_path / "q.txt"
        file.write_text("One?\n\n  Two?\n")
        assert read_questions(file) == ["One?", "Two?"]
        file.write_text("\n")
        with pytest.raises(PromptError, match="no question"):
            read_questions(file)
        with pytest.raises(PromptError, match="cannot be read"):
            read_questions(tmp_path / "none")


def answer(*ids: int, ttft_s: float = 1.0) -> Answer:
    return Answer(
        text=" ".join(map(str, ids)),
        token_ids=ids,
        ttft_s=ttft_s,
        prompt_tokens=100,
        exact_tokens=1,
        approximate_tokens=80,
        repaired_tokens=8,
        computed_tokens=28,
        fallback_reason=None,
    )


def row(reused: Answer, full: Answer) -> Row:
    return Row(question="Q?", sources=("a.md",), reused=reused, full=full)


class TestComparison:
    def test_agreement(self):
        assert row(answer(1, 2), answer(1, 2)).same
        differing = row(answer(1, 2, 3), answer(1, 5, 3, 4))
        assert not differing.same
        assert (differing.agreed_tokens, differing.shorter_tokens) == (1, 3)
        assert row(answer(1, 2), answer(1, 2, 3)).agreed_tokens == 2
        assert row(answer(), answer()).same

    def test_summary(self):
        rows = [row(answer(1, 2, ttft_s=0.5), answer(1, 2, ttft_s=3.0)), row(answer(1), answer(2, 3, ttft_s=2.0))]
        summary = summarise(rows)
        assert summary.median_ratio == 4.0
        assert summary.same_answers == 0.5
        assert summary.agreed_share == 0.5

    def test_reorder_depends_on_the_set_only(self):
        documents = [Document(page_content=str(n)) for n in range(6)]
        assert reorder(documents) == reorder(list(documents))
        assert sorted(d.page_content for d in reorder(documents)) == [d.page_content for d in documents]
        orders = {tuple(d.page_content for d in reorder(documents[:n] + documents[n:][::-1])) for n in range(6)}
        assert len(orders) > 1

    def test_output(self, capsys):
        rows = [row(answer(1, 2, ttft_s=0.5), answer(1, 2)), row(answer(1), answer(2))]
        print_row(1, rows[0])
        print_table(rows, summarise(rows))
        out = capsys.readouterr().out
        assert "80 approximate (8 repaired); 28 computed" in out
        assert "same for 0 of 1 tokens" in out
        assert "50% identical" in out


def test_errors_are_one_line(capsys, tmp_path):
    with pytest.raises(SystemExit):
        cli.main(["--k", "0"])
    assert "below 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.model
def test_the_whole_demo(capsys, tmp_path, model_path, embeddings_path):
    documents = tmp_path / "docs"
    documents.mkdir()
    library = write_python_documents(tmp_path / "library")
    for name in ("global.md", "module-secrets.md", "for.md", "while.md", "lambda.md", "try.md"):
        (documents / name).write_bytes((library / name).read_bytes())
    questions = tmp_path / "questions.txt"
    questions.write_text("\n".join(ABOUT_PYTHON[:3]))
    arguments = ["--docs", documents, "--questions", questions, "--max-tokens", 12, "--json", tmp_path / "out.json"]
    models = ["--model", model_path, "--embeddings", embeddings_path]
    assert cli.main([str(argument) for argument in [*arguments, *models]]) == 0
    out = capsys.readouterr().out
    assert "times sooner" in out
    result = json.loads((tmp_path / "out.json").read_text())
    assert len(result["questions"]) == 3
    for question in result["questions"]:
        assert question["full"]["computed_tokens"] == question["full"]["prompt_tokens"]
        assert question["reused"]["approximate_tokens"] > 0.5 * question["reused"]["prompt_tokens"]
