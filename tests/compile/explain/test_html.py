"""The page: well-formed, self-contained, complete, and not to be broken by what it shows."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from dsv4.compile.explain.html import page
from dsv4.compile.explain.page.markup import Markup, prose, tag
from dsv4.compile.explain.page.timeline import by_time, round_up, rows
from dsv4.compile.explain.report import Finding, Report, Stage
from tests.compile.explain.reports import HOSTILE, broken, clean, on_cpu, step_data, timeline

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Reader(HTMLParser):
    """Tags in balance, ids, links, and the text outside style and script."""

    def __init__(self, html: str):
        super().__init__()
        self.open, self.ids, self.links, self.tags, self.words = [], [], [], [], []
        self.attributes = set()
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.tags.append(name)
        self.attributes |= {key for key, _ in attributes}
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if "href" in values else []
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name, f"</{name}> closes another tag"

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.mark.parametrize(
    "reports", [[broken()], [clean(), on_cpu()], [Report("x", "nothing", ())]], ids=["bad", "two", "empty"]
)
def test_page_holds_together(reports):
    html = page(reports)
    reader = Reader(html)
    assert len(reader.ids) == len(set(reader.ids)) and not any(" " in name for name in reader.ids)
    assert {link for link in reader.links if link.removeprefix("#") not in reader.ids} == set()
    assert reader.tags.count("script") == 1 and reader.tags.count("h1") == len(reports)
    assert "$" not in re.sub(r"<script>.*</script>", "", html, flags=re.S)  # the template is filled in


def test_no_network():
    html = page([broken(), clean()])
    reader = Reader(html)
    assert not {"link", "img", "iframe", "object", "base", "form"} & set(reader.tags)
    assert not {"src", "srcset", "action", "onclick", "onload"} & reader.attributes
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import|fetch\(|XMLHttp|import\(", html)
    assert "default-src 'none'" in html


def test_all_of_the_report_is_there():
    report = broken()
    text = Reader(page([report])).text
    for finding in report.findings():
        for part in (finding.title, finding.reason, finding.hint, finding.source, finding.module):
            for piece in part.split("`"):
                assert re.sub(r"\s+", " ", piece).strip() in text
        assert not finding.file or f"{finding.file}:{finding.line}" in text
        assert finding.count == 1 or f"×{finding.count}" in text
    for stage in report.stages:
        assert stage.summary in text
    assert "skipping cudagraphs due to cpu device (arg3_1)" in text and "65.5 KB copied" in text
    assert "NVIDIA H200" in text and "3.6.0" in text


def test_hostile_text_stays_text():
    report = broken()
    finding = Finding("break", HOSTILE, HOSTILE, HOSTILE, HOSTILE, 3, HOSTILE, HOSTILE, 2, {HOSTILE: HOSTILE})
    kernel = {"name": HOSTILE, "module": HOSTILE, "origin": HOSTILE, "count": 1, "us": 3.0}
    data = step_data(2)
    data["kernels"].append(kernel)
    data["timeline"].append({"name": HOSTILE, "module": HOSTILE, "start_us": 900.0, "us": 3.0})
    graphs = {
        "graphs": [{"id": 0, "ops": 3, "modules": [HOSTILE]}],
        "layers": [{"name": HOSTILE, "graphs": [0], "breaks": 1}],
    }
    stages = (
        Stage(2, "found", HOSTILE, findings=(finding,), data=graphs),
        Stage(3, "ok", HOSTILE, data={"sweep": [{"shape": HOSTILE, "compiled": True}]}),
        replace(report.stage(4), data={"why": HOSTILE}),
        Stage(5, "ok", HOSTILE, data=data),
        Stage(
            6, "ok", "", data={"pairs": [{"a": HOSTILE, "b": HOSTILE, "max_abs": 1, "max_rel": 1, "first_module": HOSTILE}]}
        ),
        report.stage(7),
    )
    html = page([Report(HOSTILE, HOSTILE, stages, {HOSTILE: HOSTILE})])
    reader = Reader(html)
    assert reader.tags.count("script") == 1 and "b" in reader.tags and html.count("<script>") == 1
    assert HOSTILE not in html and reader.text.count(re.sub(r"\s+", " ", HOSTILE)) > 10


def test_every_kernel_is_in_the_timeline():
    report = broken()
    html = page([report])
    assert html.count("<rect ") == len(report.stage(5).data["timeline"]) == 601
    many = replace(report.stage(5), data=step_data(200))
    html = page([replace(report, stages=(many,))])
    assert html.count("<rect ") == 2603 and len(html) < 1_000_000


def test_rows_by_layer():
    found = rows(timeline(5))
    assert [row.name for row in found] == ["embed", *(f"layers.{i}" for i in range(5)), "head"]
    assert [len(row.spans) for row in found] == [1, 13, 13, 13, 13, 13, 2]  # sampling has no module and stays with the head
    assert found[1].spans[0][0] == 0 and found[1].length == pytest.approx(found[2].length, abs=0.1)


def test_rows_by_time_cut_long_kernels():
    """Layers that run twice, as in prefill and decode one after the other, make no rows."""
    line = timeline(3) + [kernel | {"start_us": kernel["start_us"] + 500.0} for kernel in timeline(3)]
    found = rows(line)
    assert len(found) < 12 and sum(us for row in found for _, us, _ in row.spans) == pytest.approx(
        2 * sum(k["us"] for k in timeline(3))
    )
    span = round_up(sum(row.length for row in found) / len(found))
    assert all(row.length <= span + 1e-6 for row in found)
    [first, *_] = by_time([{"name": "long", "module": "", "start_us": 5.0, "us": 95.0}] * 90)
    assert first.start == 0 and len(by_time([])) == 0
    assert [round(row.start) for row in by_time([{"name": "k", "module": "", "start_us": 0.0, "us": 0.0}])] == [0]


@pytest.mark.parametrize("value, up", [(0.7, 1), (1.0, 1), (1.1, 2), (23, 25), (260, 500), (0.0, 0)])
def test_round_up(value, up):
    assert round_up(value) == pytest.approx(up)


def test_strip_parts_graphs_where_they_change():
    def strip_of(report):
        return re.search(r'<ol class="strip">.*?</ol>', page([report])).group()

    strip = strip_of(clean())
    assert strip.count("<i ") == 43 and " cut" not in strip and "broken" not in strip
    strip = strip_of(broken(4))
    assert strip.count("<li") == 4 and strip.count("<i ") == 9 and strip.count(" cut") == 5  # layer 3 has two breaks
    assert strip.count('class="broken"') == 4 and 'href="#r0-row-1"' in strip
    layers = [{"name": f"layers.{i}", "graphs": [0], "breaks": i} for i in range(3)]  # its other graphs name no module
    data = {"graphs": [{"id": 0, "ops": 3, "modules": []}], "layers": layers}
    strip = strip_of(Report("x", "", (Stage(2, "found", "", data=data),)))
    assert strip.count("<i ") == 1 + 2 + 3 and strip.count(" cut") == 1 + 2


def test_strip_without_layers_shows_graphs_by_size():
    graphs = [{"id": 0, "ops": 30, "modules": []}, {"id": 1, "ops": 10, "modules": ["head"]}]
    html = page([Report("x", "", (Stage(2, "ok", "", data={"graphs": graphs}),))])
    assert "flex-grow: 30" in html and "flex-grow: 10" in html and "2 graphs" in html


def test_markup():
    assert tag("a", "<", [1, None, ["&"]], class_="x", data_k=3, href=None) == '<a class="x" data-k="3">&lt;1&amp;</a>'
    assert tag("p", tag("b")) == "<p><b></b></p>" and isinstance(tag("p"), Markup)
    assert tag("p", title="\"'<") == '<p title="&quot;&#x27;&lt;"></p>'
    assert tag("p", prose("use `a<b` and `")) == "<p>use <code>a&lt;b</code> and `</p>"
