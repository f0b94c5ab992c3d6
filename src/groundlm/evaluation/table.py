"""The result of an evaluation as a table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def result_table(result: dict[str, Any]) -> Table:
    """Every score of a result of `evaluate` with what it is a score of."""
    table = Table(title=f"{result['model']}  ({result['parameters']:,} parameters)")
    table.add_column("score")
    table.add_column("value", justify="right")
    table.add_column("of")
    if "tokens" in result:
        _corpus_rows(table, result)
    if "lambada" in result:
        _lambada_rows(table, result["lambada"])
    return table


def _corpus_rows(table: Table, result: dict[str, Any]) -> None:
    where = result.get("text") or f"{result['split']} of {result['data']}"
    windows = f"windows of {result['window_tokens']}"
    if "each read whole" in result["state"]:
        windows = "whole documents"
    elif result["stride_tokens"] != result["window_tokens"]:
        windows += f" every {result['stride_tokens']}"
    table.add_row("tokens", f"{result['tokens']:,}", where)
    table.add_row("bytes", f"{result['utf8_bytes']:,}", f"{result['documents']:,} documents")
    table.add_row("perplexity", _number(result["perplexity"], 3), windows)
    if result["perplexity_interval"]:
        low, high = (_number(x, 3) for x in result["perplexity_interval"])
        table.add_row("  95 % interval", f"{low} .. {high}", "documents drawn anew")
    table.add_row(
        "nats per token",
        f"{result['nats_per_token']:.4f}",
        "state " + result["state"].split(",")[0],
    )
    table.add_row("bits per byte", f"{result['bits_per_byte']:.4f}", "end-of-document left out")
    if "unigram_bits_per_byte" in result:
        unigram = f"{result['unigram_bits_per_byte']:.4f}"
        table.add_row("bits per byte, unigram", unigram, "counts of the train split")
    bands = result["loss_by_context"]
    for name, band in (("least", bands[0]), ("most", bands[-1])):
        span = f"{band['from']}" if band["from"] == band["to"] else f"{band['from']}-{band['to']}"
        table.add_row(f"nats, {name} context", f"{band['nats']:.4f}", f"{span} tokens")
    table.add_row("tokens per second", f"{result['tokens_per_s']:,.0f}", "")


def _lambada_rows(table: Table, lambada: dict[str, Any]) -> None:
    cut = f", {lambada['truncated']:,} truncated" if lambada["truncated"] else ""
    of = f"{lambada['passages']:,} passages{cut}"
    paper, field = lambada["paper"], lambada["lm_eval"]
    table.add_row("LAMBADA accuracy, paper", f"{paper['accuracy']:.4f}", "first sub-word, " + of)
    table.add_row("LAMBADA perplexity, paper", _number(paper["perplexity"], 2), "per sub-word")
    table.add_row("LAMBADA accuracy, lm-eval", f"{field['accuracy']:.4f}", "all sub-words, " + of)
    table.add_row("LAMBADA perplexity, lm-eval", _number(field["perplexity"], 2), "per word")


def _number(value: float | None, digits: int) -> str:
    return "over 1e308" if value is None else f"{value:,.{digits}f}"
