// All of the page is there without this; it adds reading a kernel under the pointer and finding equal ones.
for (const section of document.querySelectorAll(".step")) {
  const timeline = section.querySelector(".timeline");
  if (!timeline) continue;
  const readout = timeline.insertAdjacentElement("afterend", document.createElement("p"));
  readout.className = "readout";
  const report = section.closest(".report");

  const focus = (number) => {
    const kept = number === undefined || timeline.dataset.focus === number ? undefined : number;
    timeline.classList.toggle("focus", kept !== undefined);
    if (kept === undefined) delete timeline.dataset.focus;
    else timeline.dataset.focus = kept;
    for (const item of report.querySelectorAll("[data-k]")) item.classList.toggle("on", item.dataset.k === kept);
  };
  timeline.addEventListener("pointerover", ({ target }) => {
    if (target.tagName === "rect") readout.textContent = target.textContent.split("\n").join(" · ");
  });
  report.addEventListener("click", ({ target }) => {
    const item = target.closest("[data-k]");
    if (item || timeline.contains(target)) focus(item?.dataset.k);
  });
}
