// Tables that scroll can be reached with the keyboard.
const reach = () => document.querySelectorAll(".bd-article table").forEach((table) => {
  if (table.scrollWidth > table.clientWidth) table.tabIndex = 0;
  else table.removeAttribute("tabindex");
});
addEventListener("load", reach);
addEventListener("resize", reach);
// The gallery hides the text of its links, which lie over the pictures.
addEventListener("DOMContentLoaded", () =>
  document.querySelectorAll(".sphx-glr-thumbcontainer a.reference").forEach((link) =>
    link.setAttribute("aria-label", link.textContent.trim())));
