// Looks at a page in frames of given widths as a person would, and lists what is wrong with it.
// FRAMES: {width: page}, put in front of this file. The result is JSON in <pre id="found">.
const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const colour = text => (text.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
const contrast = (one, other) => {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const solid = c => c.length < 4 || c[3] === 1;

function look(frame, width) {
  const page = frame.contentDocument, view = frame.contentWindow, wrong = [];
  const style = element => view.getComputedStyle(element);
  const name = e => `${e.tagName.toLowerCase()}.${e.getAttribute("class") || ""} ${e.textContent.trim().slice(0, 40)}`;
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const background = colour(style(e).backgroundColor);
      if (solid(background)) return background;
    }
    return [255, 255, 255];
  };
  const box = element => element.getBoundingClientRect();
  const shown = page.createElement("style");
  shown.textContent = ".tip { display: block !important; }";
  page.head.append(shown);

  if (page.documentElement.scrollWidth > width) wrong.push(`the page is ${page.documentElement.scrollWidth} wide`);
  for (const element of page.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || element.closest(".unseen, style, [data-tip]")) continue;
    const seen = style(element), size = parseFloat(seen.fontSize);
    const ratio = contrast(colour(seen.color), behind(element));
    if (ratio < 4.5) wrong.push(`contrast ${ratio.toFixed(2)}: ${name(element)}`);
    if (size < 11) wrong.push(`${size} px: ${name(element)}`);
    const rect = box(element);
    const inside = element.closest(".scroll");
    if (!inside && (rect.left < 0 || rect.right > width + 1)) wrong.push(`beyond the edge: ${name(element)}`);
    if (seen.overflow !== "visible" && element.scrollWidth > element.clientWidth + 1) wrong.push(`cut: ${name(element)}`);
  }
  for (const path of page.querySelectorAll("path:not(.faint)")) {
    const ratio = contrast(colour(style(path).stroke), behind(path));
    if (ratio < 3) wrong.push(`line of contrast ${ratio.toFixed(2)}: ${path.getAttribute("class")}`);
    if (!path.getTotalLength()) wrong.push(`no line: ${path.getAttribute("class")}`);
  }
  for (const mark of page.querySelectorAll(".swatch, .lane i")) {
    const ratio = contrast(colour(style(mark).backgroundColor), behind(mark.parentElement));
    if (ratio < 3 && !mark.closest(".tip")) wrong.push(`mark of contrast ${ratio.toFixed(2)}: ${mark.className}`);
  }
  for (const axis of page.querySelectorAll(".area")) {
    for (const [ticks, first, last] of [[".x span", "left", "right"], [".y span", "top", "bottom"]]) {
      const rects = [...axis.querySelectorAll(ticks)].map(box).sort((a, b) => a[first] - b[first]);
      rects.slice(1).forEach((rect, i) => {
        if (rect[first] < rects[i][last] - 4) wrong.push(`ticks over each other: ${axis.closest("figure").textContent.slice(0, 30)}`);
      });
      if (!rects.length) wrong.push(`no ticks: ${name(axis.closest("figure"))}`);
    }
    if (!axis.querySelector(".tip em")) wrong.push(`no hover values: ${name(axis.closest("figure"))}`);
  }
  for (const element of page.querySelectorAll("[role=img], [role=region], section, dl")) {
    if (!(element.getAttribute("aria-label") || "").trim()) wrong.push(`no label: ${name(element)}`);
  }
  for (const element of page.querySelectorAll("figure, .sheet")) {
    if (!element.querySelector("h3")) wrong.push(`no heading: ${name(element)}`);
    if (box(element).height < 60) wrong.push(`empty: ${name(element)}`);
  }
  const levels = [...page.querySelectorAll("h1, h2, h3")].map(e => Number(e.tagName[1]));
  if (levels[0] !== 1 || levels.some((level, i) => i && level > levels[i - 1] + 1)) wrong.push(`headings ${levels}`);
  const lanes = page.querySelector(".lanes").parentElement;
  return {
    wrong,
    dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
    scrolls: lanes.scrollWidth > lanes.clientWidth,
    lines: page.querySelectorAll("path:not(.faint)").length,
  };
}

window.onload = () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) found[frame.width] = look(frame, Number(frame.width));
  document.getElementById("found").textContent = JSON.stringify(found);
};
