// What tests/test_browser.py asks of a page: each function returns what is wrong, by its text.

const shown = (e) =>
  e.checkVisibility({ opacityProperty: true, visibilityProperty: true }) &&
  e.getBoundingClientRect().width > 0;
const texts = [...document.querySelectorAll("svg text")].filter(
  (t) => t.textContent.trim() && shown(t),
);
const named = (e) => (e.ariaLabel ?? e.textContent).trim().replace(/\s+/g, " ").slice(0, 60);

// A text's box, without the room above and below its letters.
const box = (t) => {
  const r = t.getBoundingClientRect();
  const [x, y] = r.width >= r.height ? [1, 0.15 * r.height] : [0.15 * r.width, 1];
  return { left: r.left + x, right: r.right - x, top: r.top + y, bottom: r.bottom - y };
};

// Pairs of one picture's texts that meet, or of a text and a button.
const overlaps = () => {
  const all = [...texts, ...[...document.querySelectorAll("button")].filter(shown)];
  const boxes = all.map((e) => [e, box(e), e.closest(".plot, body > svg")]);
  return boxes.flatMap(([t, a, picture], i) =>
    boxes
      .slice(0, i)
      .filter(([, b, other]) => picture === other && a.left < b.right && b.left < a.right &&
        a.top < b.bottom && b.top < a.bottom)
      .map(([u]) => `${named(t)} | ${named(u)}`),
  );
};

// Texts that leave their picture.
const cut = () =>
  texts
    .filter((t) => {
      const a = box(t), s = t.ownerSVGElement.getBoundingClientRect();
      return a.left < s.left || a.right > s.right || a.top < s.top || a.bottom > s.bottom;
    })
    .map(named);

// Texts of less than 8 pixels.
const small = () => {
  const size = (t) => {
    const { a, b } = t.getScreenCTM();
    return parseFloat(getComputedStyle(t).fontSize) * Math.hypot(a, b);
  };
  return texts.filter((t) => size(t) < 8).map((t) => `${named(t)}: ${size(t)} pixels`);
};

// Contrast as WCAG 2 defines it.
const channels = (colour) => colour.match(/[\d.]+/g).map(Number);
const luminance = (colour) => {
  const [r, g, b] = channels(colour)
    .map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (one, other) => {
  const [low, high] = [luminance(one), luminance(other)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};

// The colour behind an element: of a text's picture the shape under its middle, else the page's.
const opaque = (colour) => colour !== "none" && (channels(colour)[3] ?? 1) > 0.5;
const filled = (shape) => {
  const style = getComputedStyle(shape);
  return opaque(style.fill) && style.fillOpacity > 0.5 && style.opacity > 0.5;
};
const behind = (e) => {
  if (e.matches("body > svg text")) {
    e.scrollIntoView({ block: "center" });
    const r = e.getBoundingClientRect();
    const at = document.elementsFromPoint((r.left + r.right) / 2, (r.top + r.bottom) / 2);
    const shape = at.find((s) => s.matches("path, rect, circle") && filled(s));
    if (shape) return getComputedStyle(shape).fill;
  }
  for (; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (opaque(colour)) return colour;
  }
  return "rgb(255, 255, 255)";
};

// Texts whose contrast is below 4.5.
const faint = () => {
  const own = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  const html = [...document.querySelectorAll("body *:not(script, style, svg *)")];
  const look = (e) => getComputedStyle(e)[e.tagName === "text" ? "fill" : "color"];
  return [...html.filter((e) => own(e) && shown(e)), ...texts]
    .map((e) => [named(e), contrast(look(e), behind(e))])
    .filter(([, found]) => found < 4.5);
};

// Charts of a page, and axes of a picture, in which nothing is drawn.
const empty = () => {
  const marks = ".scatterlayer .trace path, .barlayer .trace path, .heatmaplayer image";
  const drawn = [":scope > g[id^=line2d] :is(path, use)", ":scope > g[id^=patch] [clip-path]",
    ":scope image", ":scope > g[id^=QuadMesh]"].join();
  const lacks = (where, what) => ![...where.querySelectorAll(what)].some(shown);
  return [
    ...[...document.querySelectorAll(".plot")].filter((p) => shown(p) && lacks(p, marks)),
    ...[...document.querySelectorAll("g[id^=axes]")].filter((a) => lacks(a, drawn)),
  ].map((e) => e.id);
};

// Whether Plotly has come to its end.
const drawn = () =>
  [...document.querySelectorAll(".plot")].every((p) => !shown(p) || p.dataset.drawn === "done");

// What has the focus: its name, and whether that shows.
const focus = () => {
  const e = document.activeElement, style = getComputedStyle(e);
  const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
  return [named(e), outlined && contrast(style.outlineColor, behind(document.body)) >= 3];
};
