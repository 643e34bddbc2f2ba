// The page pool as a grid: a cell a page, coloured by who holds it.

const FREE = 0, CACHED = 1, SHARED = 2, HELD = 3, FIRST_OWNER = 4;
const MEANING = ["free", "free, content cached", "shared by several requests", "held"];
const LARGEST = 26, SMALLEST = 3; // CSS pixels of a cell

/** The hue in the middle of the largest gap between those in use. */
function freshHue(used) {
  if (!used.length) return 35;
  const sorted = used.toSorted((one, other) => one - other);
  let best = 0, from = 0;
  sorted.forEach((hue, at) => {
    const gap = (sorted[at + 1] ?? sorted[0] + 360) - hue;
    if (gap > best) [best, from] = [gap, hue];
  });
  return (from + best / 2) % 360;
}

export class Pool {
  /** @param canvas to draw on @param pointed where the cell under the pointer is explained */
  constructor(canvas, pointed) {
    this.canvas = canvas;
    this.pointed = pointed;
    this.cells = new Uint8Array();
    this.sequences = [];
    this.chosen = null; // id of the sequence whose pages stand out
    this.onchoose = () => {};
    this.hues = new Map();
    for (const name of ["pointerdown", "pointermove"]) {
      canvas.addEventListener(name, (event) => this.point(event));
    }
    canvas.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  /** Take a new state of the engine. */
  show(state) {
    this.cells = Uint8Array.from(atob(state.pool.cells), (letter) => letter.charCodeAt(0));
    this.stride = state.pool.stride;
    this.sequences = state.pool.sequences;
    this.ids = this.sequences.map((item) => `${item.request_id} ${item.index}`);
    if (!this.ids.includes(this.chosen)) this.chosen = null;
    for (const id of this.hues.keys()) if (!this.ids.includes(id)) this.hues.delete(id);
    for (const id of this.ids) {
      if (!this.hues.has(id)) this.hues.set(id, freshHue([...this.hues.values()]));
    }
    this.draw();
    this.describe();
  }

  /** CSS colour of a sequence. */
  colour(id) {
    const style = getComputedStyle(this.canvas);
    const [light, chroma] = ["--lightness", "--chroma"].map((name) => style.getPropertyValue(name));
    return `oklch(${light} ${chroma} ${this.hues.get(id) ?? 0})`;
  }

  /** Let the pages of one sequence stand out; null: of none. */
  choose(id) {
    if (this.chosen === id) return;
    this.chosen = id;
    this.draw();
    this.onchoose();
  }

  /** Whether several sequences hold a page, as far as it is drawn. */
  isShared(page) {
    return (page - 1) % this.stride === 0 && this.cells[(page - 1) / this.stride] === SHARED;
  }

  draw() {
    const total = this.cells.length;
    const width = this.canvas.parentElement.clientWidth;
    if (!total || !width) return;
    const height = width < 480 ? 240 : 340;
    let size = Math.floor(Math.sqrt((width * height) / total));
    size = Math.min(LARGEST, Math.max(SMALLEST, size));
    this.columns = Math.max(1, Math.floor(width / size));
    this.size = width / this.columns;
    const rows = Math.ceil(total / this.columns);
    const ratio = devicePixelRatio, shown = Math.ceil(rows * this.size);
    this.canvas.style.height = `${shown}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(shown * ratio);

    const brush = this.canvas.getContext("2d");
    const style = getComputedStyle(this.canvas);
    const colours = ["--free", "--cached", "--shared", "--soft"].map((name) =>
      style.getPropertyValue(name).trim(),
    );
    for (const id of this.ids) colours.push(this.colour(id));
    const chosen = this.chosen === null ? -1 : this.ids.indexOf(this.chosen) + FIRST_OWNER;
    const gap = this.size > 12 ? 2 : this.size > 4 ? 1 : 0.5;
    const side = (this.size - gap) * ratio, round = this.size > 8 ? 2 * ratio : 0;
    brush.clearRect(0, 0, this.canvas.width, this.canvas.height);
    for (let at = 0; at < total; at++) {
      const code = this.cells[at];
      const stands = chosen < FIRST_OWNER || code === chosen || code === FREE || code === SHARED;
      brush.fillStyle = colours[code] ?? colours[HELD];
      brush.globalAlpha = stands ? 1 : 0.3;
      const x = (at % this.columns) * this.size * ratio;
      const y = Math.floor(at / this.columns) * this.size * ratio;
      if (round) {
        brush.beginPath();
        brush.roundRect(x, y, side, side, round);
        brush.fill();
      } else brush.fillRect(x, y, side, side);
    }
    this.link(brush, ratio);
  }

  /** A line through the pages of the chosen sequence, in the order of its tokens. */
  link(brush, ratio) {
    const table = this.sequences[this.ids.indexOf(this.chosen)]?.table ?? [];
    brush.beginPath();
    for (const page of table) {
      const at = Math.floor((page - 1) / this.stride);
      if (page === 0) continue;
      const x = ((at % this.columns) + 0.45) * this.size * ratio;
      brush.lineTo(x, (Math.floor(at / this.columns) + 0.45) * this.size * ratio);
    }
    brush.globalAlpha = 0.8;
    brush.lineWidth = 1.5 * ratio;
    brush.lineJoin = "round";
    brush.strokeStyle = getComputedStyle(this.canvas).getPropertyValue("--ink");
    brush.stroke();
  }

  /** Say in words what the picture shows, for those who do not see it. */
  describe() {
    const counts = [0, 0, 0, 0];
    for (const code of this.cells) counts[Math.min(code, HELD)]++;
    const label =
      `The page pool: of ${this.cells.length} pages drawn ${counts[HELD]} are held by one request, ` +
      `${counts[SHARED]} shared, ${counts[CACHED]} cached, ${counts[FREE]} free`;
    this.canvas.setAttribute("aria-label", label);
  }

  point(event) {
    if (event === null || !this.size) {
      this.pointed.textContent = "";
      this.choose(null);
      return;
    }
    const column = Math.floor(event.offsetX / this.size);
    const row = Math.floor(event.offsetY / this.size);
    const at = row * this.columns + column;
    const code = column < this.columns ? this.cells[at] : undefined;
    if (code === undefined) return;
    const owner = this.sequences[code - FIRST_OWNER];
    const meaning = owner
      ? `${owner.request_id}: ${owner.num_tokens} tokens in ${owner.num_pages} pages`
      : MEANING[Math.min(code, HELD)];
    this.pointed.textContent = `page ${1 + at * this.stride} · ${meaning}`;
    this.choose(owner ? this.ids[code - FIRST_OWNER] : null);
  }
}
