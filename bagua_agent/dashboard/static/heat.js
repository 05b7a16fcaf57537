// Draws the computing time of each rank over time on a canvas. A cell's colour says how it compares with the median of its
// column, so that a straggler's row stands out whatever the absolute times are. Arrow keys read single cells.

import { colour } from "./dom.js";
import { number, seconds } from "./format.js";

const LABEL = 34;
const TALLEST = 420;

function median(values) {
  const sorted = values.filter((v) => v !== null).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : null;
}

function shade(ratio) {
  // 0.5 of the median and less: light blue; 1: blue-green; 2 and more: red
  const at = Math.max(-1, Math.min(1, Math.log2(ratio)));
  const hue = at < 0 ? 190 - at * 30 : 190 - at * 182;
  return `hsl(${hue} ${55 + Math.abs(at) * 35}% ${46 - Math.abs(at) * 4}%)`;
}

export class Heat {
  constructor(canvas, text) {
    this.canvas = canvas;
    this.text = text;
    this.data = { ranks: [], steps: [], seconds: [] };
    this.at = null;
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("pointermove", (event) => this.point(event));
  }

  show(data) {
    this.data = data;
    const { canvas } = this;
    const rowHeight = Math.max(2, Math.min(22, Math.floor(TALLEST / Math.max(1, data.ranks.length))));
    const width = canvas.clientWidth;
    const height = Math.max(1, data.ranks.length) * rowHeight;
    canvas.width = width * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(devicePixelRatio, devicePixelRatio);
    const cell = (width - LABEL) / Math.max(1, data.steps.length);
    this.shape = { cell, rowHeight };
    const middles = data.steps.map((_, column) => median(data.seconds.map((row) => row[column])));
    context.font = "11px sans-serif";
    context.textBaseline = "middle";
    data.ranks.forEach((rank, row) => {
      context.fillStyle = colour("--soft");
      if (rowHeight >= 11 || row % Math.ceil(11 / rowHeight) === 0) context.fillText(String(rank), 2, row * rowHeight + rowHeight / 2);
      data.seconds[row].forEach((value, column) => {
        if (value === null || value === undefined) return;
        context.fillStyle = shade(value / (middles[column] || value || 1));
        context.fillRect(LABEL + column * cell, row * rowHeight, Math.max(1, cell - 0.5), rowHeight - 1);
      });
    });
    if (this.at) {
      context.strokeStyle = colour("--ink");
      context.lineWidth = 2;
      context.strokeRect(LABEL + this.at.column * cell, this.at.row * rowHeight, cell, rowHeight - 1);
    }
    canvas.setAttribute("aria-label", this.summary());
  }

  summary() {
    const { ranks, seconds: rowsOf } = this.data;
    const last = ranks.map((rank, row) => [rank, rowsOf[row].at(-1)]).filter(([, value]) => value !== null && value !== undefined);
    if (!last.length) return "No rank has reported yet";
    const [rank, value] = last.reduce((a, b) => (b[1] > a[1] ? b : a));
    return `Computing time of ${ranks.length} ranks; the slowest now is rank ${rank} with ${seconds(value)} a step`;
  }

  read(row, column) {
    const { ranks, steps, seconds: rowsOf } = this.data;
    if (!ranks.length || !steps.length) return;
    this.at = { row: Math.max(0, Math.min(ranks.length - 1, row)), column: Math.max(0, Math.min(steps.length - 1, column)) };
    const value = rowsOf[this.at.row][this.at.column];
    this.text.textContent = `Rank ${ranks[this.at.row]} at step ${number(steps[this.at.column])}: ${seconds(value)} of computing a step`;
    this.show(this.data);
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const from = this.at ?? { row: 0, column: this.data.steps.length - 1 };
    this.read(from.row + (this.at ? move[0] : 0), from.column + (this.at ? move[1] : 0));
  }

  point(event) {
    if (!this.shape) return;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - LABEL) / this.shape.cell);
    if (column >= 0) this.read(Math.floor((event.clientY - box.top) / this.shape.rowHeight), column);
  }
}
