"use strict";
(() => {
  const page = JSON.parse(document.getElementById("charts").textContent);
  const views = new Map();

  // Tooltips: known values, largest first, at most LINES.
  const LINES = 14;
  const formatTooltip = (value, toHtml) => {
    if (typeof value !== "object" || value === null) return toHtml(value);
    const place = ["task", "epoch"];
    const numeric = (text) => parseFloat(String(text).replace("−", "-"));
    const known = Object.entries(value).filter(([, text]) => text !== undefined && text !== null && !["", "null", "undefined", "NaN"].includes(String(text)) && !/NaN/.test(String(text)));
    const first = known.filter(([key]) => place.includes(key) && numeric(value[key]) > 0 || key === "task");
    let rest = known.filter(([key]) => !place.includes(key));
    if (known.some(([key]) => place.includes(key))) rest.sort((a, b) => numeric(b[1]) - numeric(a[1]));
    const left = rest.length - LINES;
    if (left > 1) rest = rest.slice(0, LINES);
    const row = ([key, text]) => `<tr><td class="key">${toHtml(key)}</td><td class="value">${toHtml(text)}</td></tr>`;
    return `<table>${[...first, ...rest].map(row).join("")}${left > 1 ? `<tr><td class="key">and ${left} more</td><td></td></tr>` : ""}</table>`;
  };

  // logLevel 1: only errors. Without visible methods, Vega warns about empty scales.
  const draw = async (id) => {
    if (views.has(id)) return;
    views.set(id, null);
    const { spec, section } = page.charts[id];
    const result = await vegaEmbed(`#${CSS.escape(id)}`, { ...spec, config: page.configs[section] }, { renderer: "svg", actions: false, logLevel: 1, tooltip: { theme: "page", formatTooltip } });
    views.set(id, result.view);
    show(section);
  };

  // The visible methods, for all charts of a comparison.
  const article = (section) => document.querySelector(`[data-section="${section}"]`);
  const boxes = (section) => [...article(section).querySelectorAll(".key input")];
  const chosen = (section) => boxes(section).filter((box) => box.checked).map((box) => box.value);
  const show = (section) => {
    const keys = chosen(section);
    for (const [id, view] of views) {
      if (!view || page.charts[id].section !== section) continue;
      let old;
      try { old = view.signal("shown"); } catch { continue; }
      if (JSON.stringify(old) === JSON.stringify(keys)) continue;
      const rows = page.charts[id].spec.usermeta;
      if (rows) view.height(rows.step * Math.max(1, rows.keys.filter((key) => keys.includes(key)).length));
      view.signal("shown", keys).runAsync();
    }
    for (const figure of article(section).querySelectorAll("figure[data-contender]")) {
      figure.hidden = !keys.includes(figure.dataset.contender);
      const chart = figure.querySelector(".chart");
      if (!figure.hidden && started) draw(chart.id);
    }
  };
  let started = false;
  for (const section of Object.keys(page.configs)) {
    for (const box of boxes(section)) box.addEventListener("change", () => show(section));
    const first = boxes(section).map((box) => box.checked);
    for (const link of article(section).querySelectorAll("[data-show]")) {
      link.addEventListener("click", () => {
        boxes(section).forEach((box, i) => { box.checked = link.dataset.show === "all" || (link.dataset.show === "first" && first[i]); });
        show(section);
      });
    }
    show(section);
  }

  (async () => {
    for (const id of Object.keys(page.charts)) {
      if (!document.getElementById(id).closest("figure").hidden) await draw(id);
    }
    started = true;
    for (const section of Object.keys(page.configs)) show(section);
    document.documentElement.dataset.drawn = "yes";
  })();
})();
