"use strict";
// Theme: the system's unless the reader chooses. Colors are CSS variables, so nothing is redrawn.
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const label = () => { button.textContent = isDark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`); };
  const remember = (value) => { try { localStorage.setItem("pliant-theme", value); } catch { /* unavailable in private windows */ } };
  try { const kept = localStorage.getItem("pliant-theme"); if (kept) root.dataset.theme = kept; } catch { /* as above */ }
  if (!button) return;
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; remember(root.dataset.theme); label(); });
  dark.addEventListener("change", label);
  label();
})();
