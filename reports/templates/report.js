"use strict";
// Sort, filter and permalink of the cell table, and the drill-down drawer. The page is complete without it.
(() => {
  const $ = (id) => document.getElementById(id);
  const table = $("table"), body = table.tBodies[0], rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells], chips = [...document.querySelectorAll(".chip")];
  let most = 1000; // rows laid out at once; a browser is slow with ten thousand
  const more = document.createElement("button");
  const state = { q: "", k: "", v: new Set(), s: "", d: 1 };
  const number = { g: "g", m: "m", r: "r" };
  const text = new Map(rows.map((row) => {
    const link = row.cells[1].querySelector("a");
    return [row, (row.cells[1].textContent + " " + row.dataset.k + " " + row.cells[3].textContent + " " + row.dataset.v + " " + (link ? link.hash.slice(3) : "")).toLowerCase()];
  }));
  const fromHash = () => {
    const hash = decodeURIComponent(location.hash.slice(1));
    if (!hash.startsWith("cells?")) return false;
    const query = new URLSearchParams(hash.slice(6));
    state.q = query.get("q") || "";
    state.k = query.get("k") || "";
    state.v = new Set((query.get("v") || "").split(",").filter(Boolean));
    const sort = query.get("s") || "";
    state.s = sort.replace(/^-/, "");
    state.d = sort.startsWith("-") ? -1 : 1;
    return true;
  };
  const toHash = () => {
    const query = new URLSearchParams();
    if (state.q) query.set("q", state.q);
    if (state.k) query.set("k", state.k);
    if (state.v.size) query.set("v", [...state.v].join(","));
    if (state.s) query.set("s", (state.d < 0 ? "-" : "") + state.s);
    const words = query.toString();
    return words ? "#cells?" + words : "#cells";
  };
  const column = (key) => heads.findIndex((head) => head.dataset.s === key);
  const sortValue = (row, key) => {
    if (number[key]) return row.dataset[key] === undefined ? null : +row.dataset[key];
    const words = row.cells[column(key)].textContent.trim();
    return key === "p" ? (words === "" ? null : +words) : words.toLowerCase();
  };
  const compare = (a, b) => {
    if (a === b) return 0;
    if (a === null) return 1;
    if (b === null) return -1;
    return (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true })) * state.d;
  };
  const sort = () => {
    let order = rows;
    if (state.s && column(state.s) >= 0) {
      order = rows.map((row, at) => [sortValue(row, state.s), at, row]).sort((x, y) => compare(x[0], y[0]) || x[1] - y[1]).map((x) => x[2]);
    }
    const parts = document.createDocumentFragment();
    order.forEach((row) => parts.appendChild(row));
    body.appendChild(parts);
    heads.forEach((head) => {
      if (state.s && head.dataset.s === state.s) head.setAttribute("aria-sort", state.d < 0 ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  };
  const filter = () => {
    const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of body.rows) {
      const on = (!state.v.size || state.v.has(row.dataset.v)) && (!state.k || row.dataset.k === state.k) && words.every((word) => text.get(row).includes(word));
      shown += on;
      row.hidden = !on || shown > most;
    }
    more.hidden = shown <= most;
    const noun = $("shown").dataset.noun || " cell";
    $("shown").textContent = (shown === rows.length ? "" : shown + " of ") + rows.length + noun + (rows.length === 1 ? "" : "s");
    $("reset").hidden = !(state.q || state.k || state.v.size);
    $("q").value = state.q;
    $("k").value = state.k;
    chips.forEach((chip) => chip.setAttribute("aria-pressed", String(state.v.has(chip.dataset.v))));
  };
  const remember = () => {
    try { history.replaceState(null, "", toHash()); } catch { /* some viewers forbid it: then there is no permalink */ }
  };
  more.type = "button";
  more.className = "plain";
  more.textContent = "Show all rows";
  table.parentNode.after(more);
  more.addEventListener("click", () => { most = Infinity; filter(); });
  const changed = () => { filter(); remember(); };

  heads.filter((head) => head.dataset.s).forEach((head) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const key = head.dataset.s, first = key === "g" || key === "p" || key === "m" ? -1 : 1;
      if (state.s === key) state.d = -state.d;
      else { state.s = key; state.d = first; }
      sort();
      filter();
      remember();
    });
  });
  $("q").addEventListener("input", () => { state.q = $("q").value; changed(); });
  $("k").addEventListener("change", () => { state.k = $("k").value; changed(); });
  chips.forEach((chip) => chip.addEventListener("click", () => {
    if (!state.v.delete(chip.dataset.v)) state.v.add(chip.dataset.v);
    changed();
  }));
  $("reset").addEventListener("click", () => { state.q = state.k = ""; state.v.clear(); changed(); $("q").focus(); });

  // The drawer is shown by :target alone. Here: focus, Escape, neighbours, and the way back to where one was.
  let before = null;
  const current = () => {
    const found = location.hash.length > 1 ? $(decodeURIComponent(location.hash.slice(1))) : null;
    return found && found.classList.contains("detail") ? found : null;
  };
  const linkOf = (row) => row.cells[1].querySelector("a");
  const close = () => { location.hash = toHash(); };
  const step = (by) => {
    const seen = [...body.rows].filter((row) => !row.hidden && linkOf(row));
    const at = seen.findIndex((row) => linkOf(row).hash === location.hash);
    const next = seen[at + by];
    if (next) location.replace(linkOf(next).hash);
  };
  const equip = (detail) => {
    if (detail.dataset.ready) return;
    detail.dataset.ready = "1";
    const nav = document.createElement("div");
    nav.className = "nav";
    for (const [words, by] of [["Previous", -1], ["Next", 1]]) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = words;
      button.addEventListener("click", () => step(by));
      nav.append(button);
    }
    const closer = detail.querySelector(".close");
    closer.before(nav);
    nav.append(closer);
    closer.addEventListener("click", (event) => { event.preventDefault(); close(); });
    for (const command of navigator.clipboard ? detail.querySelectorAll(".cmd") : []) {
      const box = document.createElement("div"), button = document.createElement("button");
      box.className = "cmdbox";
      button.type = "button";
      button.textContent = "Copy";
      button.addEventListener("click", () => navigator.clipboard.writeText(command.textContent).then(() => { button.textContent = "Copied"; }, () => { button.textContent = "Select it by hand"; }));
      command.before(box);
      box.append(command, button);
    }
  };
  const route = () => {
    const detail = current();
    body.querySelectorAll(".here").forEach((row) => row.classList.remove("here"));
    if (detail) {
      if (!before) before = { focus: null, y: scrollY };
      equip(detail);
      detail.focus({ preventScroll: true });
      const row = rows.find((one) => linkOf(one) && linkOf(one).hash === location.hash);
      if (row) row.classList.add("here");
      return;
    }
    const filtered = fromHash();
    if (filtered) { sort(); filter(); }
    if (before) {
      const { focus, y } = before;
      before = null;
      scrollTo({ top: y, behavior: "instant" });
      if (focus) focus.focus({ preventScroll: true });
    } else if (filtered) $("cells").scrollIntoView();
    const target = location.hash.length > 1 && !filtered ? $(decodeURIComponent(location.hash.slice(1))) : null;
    if (target && target.tagName === "DETAILS") target.open = true;
  };
  // A followed link moves the focus before hashchange tells of it, so the way back is noted at the click.
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#c-"]');
    if (link && !current()) before = { focus: link, y: scrollY };
  });
  addEventListener("hashchange", route);
  addEventListener("keydown", (event) => { if (event.key === "Escape" && current()) close(); });
  $("tools").hidden = false;
  filter();
  route();
})();
