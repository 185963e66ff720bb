// Search: guides come before API pages, and the changelog comes last. The basic numbers are Sphinx's own.
var Scorer = {
  score: ([page, title, , , score]) => {
    const asked = (new URLSearchParams(location.search).get("q") || "").trim().toLowerCase();
    if (title.toLowerCase().replace(/[?:].*/, "") === asked) return score + 30;
    if (page === "changelog") return score - 20;
    return page.startsWith("api/") ? score : score + 6;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
