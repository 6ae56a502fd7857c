// Sort a table by a column: ascending, descending, original order. Cells without a number come last.
for (const th of document.querySelectorAll("thead th")) {
  const body = th.closest("table").tBodies[0], rows = [...body.rows], button = document.createElement("button");
  if (rows.length < 2 || !th.textContent) continue;
  button.append(...th.childNodes);
  th.append(button);
  const key = row => {
    const text = row.cells[th.cellIndex].textContent.replaceAll(",", "");
    const unit = {k: 1e3, M: 1e6, G: 1e9, T: 1e12}[text.match(/ ([kMGT])B$/)?.[1]] ?? 1;
    return text === "best" ? 0 : parseFloat(text) * unit;
  };
  const words = row => row.cells[th.cellIndex].textContent;
  const numbers = rows.some(row => !isNaN(key(row)));
  button.onclick = () => {
    const next = {ascending: "descending", descending: null}[th.getAttribute("aria-sort")], way = next ?? "ascending";
    for (const other of th.parentNode.cells) other.removeAttribute("aria-sort");
    if (next === null) return body.append(...rows);
    th.setAttribute("aria-sort", way);
    const sign = way === "ascending" ? 1 : -1;
    const compare = numbers
      ? (a, b) => isNaN(key(a)) - isNaN(key(b)) || sign * (key(a) - key(b)) || 0
      : (a, b) => sign * words(a).localeCompare(words(b));
    body.append(...[...rows].sort(compare));
  };
}
