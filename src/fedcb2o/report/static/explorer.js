"use strict";
// Results explorer. The data are one deflated block: length of the JSON, the JSON, low bytes, high bytes.
const $ = id => document.getElementById(id);
const MISSING = 65535, MIN_SEEDS = 5, LEVEL = 0.05;
const SCALE = [[0, 0], [0.05, 0.28], [0.1, 0.5], [0.2, 0.75], [0.5, 0.9], [1, 1]];
let tables, low, high, shown = null, timer = null;

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// ---- statistics: Student's distribution, intervals and Holm's correction

function logGamma(x) {
  const terms = [76.18009172947146, -86.50532032941677, 24.01409824083091, -1.231739572450155,
    0.1208650973866179e-2, -0.5395239384953e-5];
  const sum = terms.reduce((total, term, i) => total + term / (x + 1 + i), 1.000000000190015);
  return Math.log(2.5066282746310005 * sum / x) + (x + 0.5) * Math.log(x + 5.5) - x - 5.5;
}

function incompleteBeta(x, a, b) {
  if (x <= 0) return 0;
  if (x >= 1) return 1;
  if (x > (a + 1) / (a + b + 2)) return 1 - incompleteBeta(1 - x, b, a);
  const start = Math.exp(logGamma(a + b) - logGamma(a) - logGamma(b) + a * Math.log(x) + b * Math.log(1 - x));
  let c = 1, d = 1 / (1 - (a + b) * x / (a + 1)), value = d;
  for (let m = 1; m < 300; m++) {
    for (const term of [m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
      -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))]) {
      d = 1 / (1 + term * d);
      c = 1 + term / c;
      value *= c * d;
    }
    if (Math.abs(c * d - 1) < 1e-14) break;
  }
  return start * value / a;
}

const pValue = (t, freedom) => incompleteBeta(freedom / (freedom + t * t), freedom / 2, 0.5);
const quantiles = new Map();

function quantile(freedom) {
  if (!quantiles.has(freedom)) {
    let below = 0, above = 1000;
    for (let i = 0; i < 100; i++) {
      const middle = (below + above) / 2;
      if (pValue(middle, freedom) > LEVEL) below = middle; else above = middle;
    }
    quantiles.set(freedom, below);
  }
  return quantiles.get(freedom);
}

function summarise(values, isRate) {
  const known = values.filter(value => !Number.isNaN(value)), count = known.length;
  if (!count) return null;
  const mean = known.reduce((sum, value) => sum + value, 0) / count;
  const result = {count, mean, low: null, high: null, p: null};
  if (count < MIN_SEEDS) return result;
  const variance = known.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (count - 1);
  const error = Math.sqrt(variance / count), half = quantile(count - 1) * error;
  result.p = error > 1e-12 ? pValue(mean / error, count - 1) : Number(Math.abs(mean) < 1e-12);
  result.low = mean - half;
  result.high = mean + half;
  if (isRate) {
    const slope = mean * (1 - mean), onLogit = sign =>
      half < 1e-12 ? mean : 1 / (1 + Math.exp(-(Math.log(mean / (1 - mean)) + sign * half / slope)));
    result.low = onLogit(-1);
    result.high = onLogit(1);
  }
  return result;
}

function holm(cells) {
  const known = cells.filter(cell => cell && cell.p !== null).sort((a, b) => a.p - b.p);
  let worst = 0;
  known.forEach((cell, i) => {
    worst = Math.max(worst, Math.min(1, cell.p * (known.length - i)));
    cell.significant = worst < LEVEL;
  });
}

// ---- one table

function seedValues(table, measure, i, j) {
  if (table.base) return addedValues(table, measure, i, j);
  const start = measure.offset + (i * table.columns.length + j) * table.seeds.length;
  return table.seeds.map((_, k) => {
    const number = low[start + k] + 256 * high[start + k];
    return number === MISSING ? NaN : number * measure.step + (measure.least || 0);
  });
}

function compute(table, measure, state) {
  const lowIsWorse = measure.worse === "low", sign = lowIsWorse ? -1 : 1;
  const columns = table.columns.map((_, j) => j).filter(j =>
    table.defences.some((_, i) => seedValues(table, measure, i, j).some(value => !Number.isNaN(value))));
  const full = table.counts.map(count => count === Math.max(...table.counts));
  const wanted = state.filter.toLowerCase().split(/\s+/);
  const rows = table.defences.map((name, i) => ({name, i, full: full[i]}))
    .filter(row => (row.full || state.few) && wanted.every(word => row.name.toLowerCase().includes(word)));
  const base = {};
  for (const j of columns) {
    if (state.show === "difference") base[j] = table.defences.indexOf(state.to);
    if (state.show === "regret") {
      const means = table.defences.map((_, i) => full[i] ? summarise(seedValues(table, measure, i, j), false) : null);
      const most = Math.max(...means.map(cell => cell ? cell.count : 0));
      let best = -1;
      means.forEach((cell, i) => {
        if (cell && cell.count === most && (best < 0 || sign * cell.mean < sign * means[best].mean)) best = i;
      });
      base[j] = best;
    }
  }
  for (const row of rows) {
    row.cells = columns.map(j => {
      const own = seedValues(table, measure, row.i, j);
      if (state.show === "value") return summarise(own, measure.percent);
      if (!row.full || base[j] < 0) return null;
      const other = seedValues(table, measure, base[j], j);
      const pairs = own.map((value, k) => state.show === "regret" ? sign * (value - other[k]) : value - other[k]);
      const cell = summarise(pairs, false);
      if (cell && base[j] === row.i) cell.best = state.show === "regret";
      if (cell && base[j] === row.i) cell.p = cell.low = cell.high = null;
      return cell;
    });
    const attacks = row.cells.filter((_, k) => state.show === "regret" || columns[k] >= table.baselines);
    row.worst = null;
    if (measure.worse !== "neither" && attacks.length && attacks.every(cell => cell)) {
      const worseHigh = state.show === "regret" || !lowIsWorse;
      row.worst = attacks.reduce((a, b) => (worseHigh ? b.mean > a.mean : b.mean < a.mean) ? b : a);
    }
  }
  if (state.show === "difference") holm(rows.flatMap(row => row.cells));
  const means = rows.flatMap(row => row.cells).filter(cell => cell).map(cell => cell.mean);
  measure.best = Math.max(...means);
  return {columns, rows, hidden: full.filter(is => !is).length};
}

function badness(cell, table, measure, state) {
  if (measure.worse === "neither" || !cell) return 0;
  const unit = measure.percent ? 1 : 1 / (measure.largest || 1), value = cell.mean * unit;
  if (state.show === "difference") return measure.worse === "low" ? -value : value;
  if (state.show === "regret") return value;
  return measure.worse === "low" ? measure.best * unit - value : value;
}

function shade(value) {
  const size = Math.min(1, Math.abs(value)), next = SCALE.findIndex(([distance]) => distance >= size);
  if (next <= 0) return 0;
  const [x0, y0] = SCALE[next - 1], [x1, y1] = SCALE[next];
  return Math.sign(value) * (y0 + (y1 - y0) * (size - x0) / (x1 - x0));
}

function format(number, measure, signed) {
  const value = measure.percent ? 100 * number : number, digits = measure.percent ? 1 : 3;
  const text = Math.abs(value).toFixed(digits), isZero = Number(text) === 0;
  return (value < 0 && !isZero ? "−" : signed && !isZero ? "+" : "") + text;
}

function interval(cell, measure, signed) {
  if (cell.low === null) return "";
  return `[${format(cell.low, measure, signed)}, ${format(cell.high, measure, signed)}]`;
}

function describe(row, title, cell, table, measure, state) {
  if (!cell) return `${row.name}, ${title}: no value.`;
  const signed = state.show === "difference";
  const seeds = `${cell.count} seed${cell.count === 1 ? "" : "s"}`;
  const range = cell.low === null ? "too few seeds for an interval" : `95% interval ${interval(cell, measure, signed)}`;
  const verdict = !signed || cell.p === null ? "" : cell.significant ? "; significant" : "; not significant";
  return `${row.name}, ${title}: ${format(cell.mean, measure, signed)}; ${range}; ${seeds}${verdict}.`;
}

// ---- the page

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  const table = tables.find(each => each.id === given.get("grid")) ?? tables[0];
  const measure = table.measures.find(each => each.name === given.get("measure")) ?? table.measures[0];
  const show = ["value", "regret", "difference"].find(name => name === given.get("show")) ?? "value";
  const to = table.defences.includes(given.get("to")) ? given.get("to") : table.defences[table.reference];
  return {table, measure, show: measure.worse === "neither" && show === "regret" ? "value" : show, to,
    filter: given.get("filter") ?? "", ci: given.get("ci") === "1", few: given.get("few") === "1",
    sort: given.get("sort"), down: given.get("down") === "1", row: given.get("row")};
}

function fragment(state, changes = {}) {
  const all = {...state, ...changes}, query = new URLSearchParams();
  query.set("grid", all.table.id);
  query.set("measure", all.measure.name);
  query.set("show", all.show);
  if (all.show === "difference") query.set("to", all.to);
  for (const key of ["filter", "sort", "row"]) if (all[key]) query.set(key, all[key]);
  for (const key of ["ci", "few", "down"]) if (all[key]) query.set(key, "1");
  return "#" + query;
}

function fill(select, options, chosen) {
  select.replaceChildren(...options.map(([value, text]) => {
    const option = element("option", {value}, text);
    option.selected = value === chosen;
    return option;
  }));
}

function change(changes) {
  const state = {...readState(), row: null, ...changes};
  if (changes.table) Object.assign(state, {sort: null, filter: ""});
  history.replaceState(null, "", fragment(state));
  draw();
}

function orderRows(rows, columns, table, measure, state) {
  if (!state.sort) return rows;
  const k = columns.findIndex(j => table.columns[j] === state.sort);
  const key = row => (k < 0 ? row.worst : row.cells[k])?.mean;
  return [...rows].sort((a, b) => {
    const first = key(a), second = key(b);
    if (first === undefined || second === undefined) return (first === undefined) - (second === undefined);
    return state.down ? second - first : first - second;
  });
}

function headingCell(title, state, isWorst) {
  const sort = isWorst ? "worst" : title, active = state.sort === sort;
  const way = !active ? null : state.down ? "descending" : "ascending";
  const button = element("button", {type: "button"}, title);
  button.onclick = () => {
    const next = !active ? {sort, down: false} : state.down ? {sort: null, down: false} : {sort, down: true};
    change(next);
    document.querySelectorAll("thead button").forEach(each => { if (each.textContent === title) each.focus(); });
  };
  return element("th", {scope: "col", "aria-sort": way}, button);
}

function valueCell(row, title, cell, table, measure, state, isFailed, isExceeded) {
  const level = shade(badness(cell, table, measure, state));
  const kind = Math.abs(level) < 0.005 ? null : level > 0 ? "worse" : "better";
  const made = element("td", {class: kind, style: kind && `--shade:${Math.abs(level).toFixed(2)}`, tabindex: "-1"});
  const text = cell ? (cell.best ? "best" : state.show === "difference" && row.name === state.to ? "reference" : format(cell.mean, measure, state.show === "difference")) : isFailed ? "failed" : "–";
  made.append(text + (cell?.significant ? " *" : "") + (cell && isExceeded ? " †" : ""));
  if (state.ci && cell && !cell.best && cell.low !== null)
    made.append(" ", element("small", {}, interval(cell, measure, state.show === "difference")));
  made.dataset.detail = describe(row, title, cell, table, measure, state);
  return made;
}

function draw() {
  const state = readState(), {table, measure} = state;
  const {columns, rows, hidden} = compute(table, measure, state);
  shown = {state, columns, rows: orderRows(rows, columns, table, measure, state)};
  fill($("grid"), tables.map(each => [each.id, each.title]), table.id);
  fill($("measure"), table.measures.map(each => [each.name, each.title]), measure.name);
  fill($("to"), table.defences.map((name, i) => [name, name]), state.to);
  $("show").value = state.show;
  $("to").closest("label").hidden = state.show !== "difference";
  if (document.activeElement !== $("filter")) $("filter").value = state.filter;
  $("ci").checked = state.ci;
  $("few").checked = state.few;
  $("few").closest("label").hidden = hidden === 0;

  const hasWorst = shown.rows.some(row => row.worst);
  const titles = columns.map(j => table.columns[j]);
  const head = element("tr", {}, element("th", {scope: "col"}, "Defence"));
  if (hasWorst) head.append(headingCell("Worst", state, true));
  titles.forEach(title => head.append(headingCell(title, state, false)));
  const body = shown.rows.map(row => {
    const link = element("a", {href: fragment(state, {row: row.name}), title: table.changes[row.i]}, row.name);
    const label = element("th", {scope: "row"}, link);
    if (!row.full) label.append(element("small", {}, ` ${table.counts[row.i]} seeds`));
    const line = element("tr", {class: row.name === state.row ? "chosen" : null}, label);
    if (hasWorst) line.append(valueCell(row, "worst column", row.worst, table, measure, state, false, false));
    row.cells.forEach((cell, k) => {
      const flat = row.i * table.columns.length + columns[k];
      line.append(valueCell(row, titles[k], cell, table, measure, state,
        table.failed.includes(flat), table.exceeded.includes(flat)));
    });
    return line;
  });
  $("table").replaceChildren(element("caption", {}, element("span", {}, captionOf(state))), element("thead", {}, head), element("tbody", {}, ...body));
  const first = $("table").querySelector("td");
  if (first) first.tabIndex = 0;
  $("about").textContent = table.about;
  $("facts").replaceChildren(...table.facts.flatMap(([key, text]) => [element("dt", {}, key), element("dd", {}, text)]));
  const few = hidden && !state.few ? ` ${hidden} defences with fewer seeds are hidden.` : "";
  $("status").textContent = `${shown.rows.length} defences, ${columns.length} columns.${few}`;
  showHidden();
  const chosen = $("table").querySelector(".chosen");
  if (chosen) chosen.scrollIntoView({block: "nearest"});
}

// Columns beyond the right edge, counted below the table.
function showHidden() {
  const right = document.querySelector(".results").getBoundingClientRect().right;
  const count = [...$("table").tHead.rows[0].cells].filter(cell => cell.getBoundingClientRect().right > right + 1).length;
  $("more").textContent = count ? `${count} more column${count === 1 ? "" : "s"} to the right: scroll →` : "";
}

function captionOf(state) {
  const {table, measure} = state, unit = measure.percent ? ", percent" : "";
  const show = {value: "", regret: ", points behind the best defence of each column",
    difference: `, difference from ${state.to}`}[state.show];
  return `${table.title}: ${measure.title.toLowerCase()}${unit}${show}. ${measure.caption}`;
}

function csvText() {
  const {state, columns, rows} = shown, {table, measure} = state;
  const quote = value => `"${String(value).replaceAll('"', '""')}"`;
  const lines = ["grid,defence,column,measure,show,mean,low,high,seeds,significant"];
  for (const row of rows) row.cells.forEach((cell, k) => {
    if (!cell) return;
    const numbers = [cell.mean, cell.low, cell.high].map(value => value === null ? "" : +value.toPrecision(6));
    const verdict = state.show !== "difference" || cell.p === null ? "" : cell.significant ? "yes" : "no";
    lines.push([...[table.title, row.name, table.columns[columns[k]], measure.name, state.show].map(quote),
      ...numbers, cell.count, verdict].join(","));
  });
  return lines.join("\n") + "\n";
}

function moveFocus(event) {
  const cell = event.target.closest("td"), steps = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};
  if (!cell || !steps[event.key]) return;
  const [down, right] = steps[event.key], rows = $("table").tBodies[0].rows;
  const next = rows[cell.parentNode.sectionRowIndex + down]?.cells[cell.cellIndex + right];
  if (next?.tagName !== "TD") return;
  event.preventDefault();
  cell.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function showDetail(event) {
  const detail = event.target.closest("td")?.dataset.detail;
  if (detail) $("detail").textContent = detail;
}

// ---- a summary.csv of the reader, shown beside the chosen table

function addedValues(table, measure, i, j) {
  const {base} = table, column = table.columns[j], own = measure.base;
  return table.seeds.map(seed => {
    if (i >= base.defences.length) return table.added.get([table.defences[i], column, seed, measure.name].join("\n")) ?? NaN;
    const k = base.seeds.indexOf(seed);
    return k < 0 || !own || j >= base.columns.length ? NaN : seedValues(base, own, i, j)[k];
  });
}

function parseCsv(text) {
  const [head, ...rows] = text.trim().split(/\r?\n/).map(line =>
    [...("," + line).matchAll(/,(?:"((?:[^"]|"")*)"|([^,]*))/g)].map(([, quoted, plain]) => quoted?.replaceAll('""', '"') ?? plain));
  return rows.map(row => Object.fromEntries(head.map((name, k) => [name, row[k] ?? ""])));
}

function addSummary(name, text) {
  const chosen = readState().table, base = chosen.base ?? chosen, rows = parseCsv(text), added = new Map();
  if (!rows.length || !["defence", "attack", "seed"].every(key => key in rows[0])) throw new Error("it has no columns defence, attack and seed");
  const roles = {clean: "Attackers clean", removed: "Attackers removed"}, all = values => [...new Set(values)];
  const settings = all(rows.map(row => row.setting)).length > 1;
  for (const row of rows) {
    row.defence = `${row.defence}${settings ? `, ${row.setting}` : ""} (${name})`;
    row.attack = roles[row.role] || row.attack;
    row.seed = Number(row.seed);
    for (const [key, value] of Object.entries(row)) if (typeof value === "string" && value !== "" && !Number.isNaN(Number(value)))
      added.set([row.defence, row.attack, row.seed, key].join("\n"), Number(value));
  }
  const own = all(rows.map(row => row.defence)), seeds = all([...base.seeds, ...rows.map(row => row.seed)]);
  const columns = all([...base.columns, ...rows.map(row => row.attack)]);
  const move = flat => Math.floor(flat / base.columns.length) * columns.length + flat % base.columns.length;
  const counts = own.map(defence => all(rows.filter(row => row.defence === defence).map(row => row.seed)).length);
  const largest = measure => Math.max(measure.largest, ...[...added].filter(([key]) => key.endsWith("\n" + measure.name)).map(([, value]) => value));
  const table = {...base, base, added, columns, seeds, id: `${base.id}+${name}`, title: `${base.title}, beside ${name}`,
    defences: [...base.defences, ...own], changes: [...base.changes, ...own.map(() => name)], counts: [...base.counts, ...counts],
    exceeded: base.exceeded.map(move), failed: base.failed.map(move),
    measures: base.measures.map(measure => ({...measure, base: measure, largest: largest(measure)}))};
  tables = [...tables.filter(each => each.id !== table.id), table];
  $("grid").closest("label").hidden = false;
  change({table, few: true});
}

async function openFile(file) {
  try {
    addSummary(file.name, await file.text());
  } catch (error) {
    $("status").textContent = `${file.name} is no summary.csv of a grid: ${error.message}.`;
  }
}

async function start() {
  const data = await unpack($("data").textContent), length = new DataView(data.buffer).getUint32(0, true);
  tables = JSON.parse(new TextDecoder().decode(data.subarray(4, 4 + length)));
  const count = (data.length - 4 - length) / 2;
  low = data.subarray(4 + length, 4 + length + count);
  high = data.subarray(4 + length + count);
  document.forms[0].onsubmit = () => false;
  $("grid").onchange = () => change({table: tables.find(each => each.id === $("grid").value)});
  $("measure").onchange = () => change({measure: readState().table.measures.find(each => each.name === $("measure").value)});
  $("show").onchange = () => change({show: $("show").value});
  $("to").onchange = () => change({to: $("to").value});
  $("ci").onchange = () => change({ci: $("ci").checked});
  $("few").onchange = () => change({few: $("few").checked});
  $("filter").oninput = () => { clearTimeout(timer); timer = setTimeout(() => change({filter: $("filter").value}), 120); };
  $("csv").onclick = () => {
    const link = element("a", {download: "results.csv", href: URL.createObjectURL(new Blob([csvText()], {type: "text/csv"}))});
    link.click();
    URL.revokeObjectURL(link.href);
  };
  $("file").onchange = () => { if ($("file").files.length) openFile($("file").files[0]); };
  document.ondragover = event => event.preventDefault();
  document.ondrop = event => {
    event.preventDefault();
    if (event.dataTransfer.files.length) openFile(event.dataTransfer.files[0]);
  };
  document.querySelector(".results").onscroll = showHidden;
  addEventListener("resize", showHidden);
  $("table").onkeydown = moveFocus;
  $("table").addEventListener("focusin", showDetail);
  $("table").onmouseover = showDetail;
  addEventListener("hashchange", draw);
  draw();
  document.body.dataset.ready = "yes";
}

start();
