// Draws curves over time with uPlot, with the job's generations as vertical lines.

import { colour } from "./dom.js";
import { clock, moment, number } from "./format.js";

const HEIGHT = 210;
const LABEL_WIDTH = 18;
const DAY_S = 86400;
const MOMENT_WIDTH = 150;

function marks(read) {
  return {
    hooks: {
      draw: (plot) => {
        const { ctx } = plot;
        const { left, top, width, height } = plot.bbox;
        ctx.save();
        ctx.lineWidth = devicePixelRatio;
        ctx.font = `${11 * devicePixelRatio}px sans-serif`;
        let labelled = -Infinity;
        for (const mark of read()) {
          const x = plot.valToPos(mark.at, "x", true);
          if (x < left || x > left + width) continue;
          ctx.strokeStyle = ctx.fillStyle = colour(mark.kind === "failover" ? "--bad" : "--waiting");
          ctx.setLineDash(mark.kind === "failover" ? [6, 4] : [2, 4]);
          ctx.beginPath();
          ctx.moveTo(x, top);
          ctx.lineTo(x, top + height);
          ctx.stroke();
          if (x - labelled < LABEL_WIDTH * devicePixelRatio) continue;
          labelled = x;
          ctx.fillText(String(mark.number), x + 3 * devicePixelRatio, top + 11 * devicePixelRatio);
        }
        ctx.restore();
      },
    },
  };
}

export class Chart {
  // fromZero: the axis of values begins at 0.
  constructor(target, label, colourName, fromZero = false) {
    this.fromZero = fromZero;
    this.target = target;
    this.label = label;
    this.colourName = colourName;
    this.marks = [];
    this.plot = null;
    this.look = "";
    this.about = target.getAttribute("aria-label");
  }

  // What the picture shows, for those who do not see it.
  describe(at, values) {
    const newest = values.findLast((value) => value !== null && value !== undefined);
    const seen = this.marks.filter((mark) => mark.at >= at[0] && mark.at <= at.at(-1));
    const changes = seen.map((mark) => `${mark.number} (${mark.kind})`).join(", ");
    const texts = [newest === undefined ? "no value yet" : `${number(newest)} now`];
    if (changes) texts.push(`generations ${changes} are marked`);
    this.target.setAttribute("aria-label", `${this.about}: ${texts.join("; ")}`);
  }

  show(at, values, marksToShow, label = this.label) {
    this.marks = marksToShow;
    this.describe(at, values);
    const width = this.target.clientWidth;
    const look = `${label} ${colour("--ink")}`;
    if (!this.plot || look !== this.look) {
      this.plot?.destroy();
      this.look = look;
      const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
      const isLong = ({ max, min }) => max - min > DAY_S;
      // A moment that the right edge would cut off is left out.
      const momentIn = (plot, { max, min }) => (at) => (((max - at) / (max - min)) * plot.width < MOMENT_WIDTH / 2 ? "" : moment(at));
      const timeAxis = {
        ...axis, size: 34,
        space: (plot) => (isLong(plot.scales.x) ? MOMENT_WIDTH : 90),
        values: (plot, times) => times.map(isLong(plot.scales.x) ? momentIn(plot, plot.scales.x) : clock),
      };
      this.plot = new uPlot(
        {
          width, height: HEIGHT, legend: { show: false }, cursor: { points: { size: 6 } },
          padding: [8, 12, 0, 0],
          scales: this.fromZero ? { y: { range: (_, least, most) => [0, most > 0 ? most * 1.1 : 1] } } : {},
          series: [{}, { label, stroke: colour(this.colourName), width: 2, spanGaps: true, points: { show: false } }],
          axes: [timeAxis, { ...axis, size: 56, values: (_, found) => found.map(number) }],
          plugins: [marks(() => this.marks)],
        },
        [at, values],
        this.target,
      );
      return;
    }
    if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
    this.plot.setData([at, values]);
  }
}
