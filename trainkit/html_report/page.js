"use strict";
// Draws the curves of a report with uPlot, and serves its controls. Texts reach the page as text, never as HTML.
(() => {
  const root = document.documentElement;
  const at = id => document.getElementById(id);
  const data = JSON.parse(at("data").textContent);
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const shown = data.runs.map(() => true);
  let charts = [], view = null, whole = [0, 1];

  const short = value => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(2).replace(/\.?0+e/, "e");
    return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  };
  const bytes = value => value >= 2 ** 30 ? `${short(value / 2 ** 30)} GiB` : `${short(value / 2 ** 20)} MiB`;
  const clock = value => {
    if (Math.abs(value) < 120) return `${short(value)} s`;
    const whole = Math.round(value), two = n => String(n).padStart(2, "0");
    return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
  };
  const SHOW = {
    number: short,
    bytes,
    seconds: value => Math.abs(value) < 1 ? `${short(value * 1000)} ms` : clock(value),
    share: value => `${short(value * 100)} %`,
    percent: value => `${short(value)} %`,
  };

  const MOVES = ["mousemove", "mouseleave"];  // what one chart's mark tells the others
  // Distances between the ticks of an axis.
  const STEPS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].flatMap(power => [1, 2, 5].map(each => each * 10 ** power));
  const SECONDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200].concat(
    [1, 2, 5, 10, 20, 50, 100].map(days => days * 86400));
  const BYTES = [20, 30].flatMap(power => [1, 2, 5, 10, 20, 50, 100, 200, 500].map(each => each * 2 ** power));

  // The seconds of a step, between those that are known.
  const timeOf = (run, step) => {
    const { x, s } = data.runs[run];
    if (!x.length) return step;
    let low = 0, high = x.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] <= step) low = middle; else high = middle;
    }
    if (high === low || step <= x[0]) return s[0];
    return s[low] + (s[high] - s[low]) * Math.min(1, (step - x[low]) / (x[high] - x[low]));
  };

  // The mean of a share of all values around each.
  const smoothed = (values, share) => {
    const reach = Math.max(1, Math.round(values.length * share / 2));
    return values.map((_, place) => {
      const near = values.slice(Math.max(0, place - reach), place + reach + 1).filter(value => value !== null);
      return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : null;
    });
  };

  const styleOf = run => {
    const swatch = document.querySelector(`.key[data-run="${run}"] svg`);
    const dashes = swatch.firstElementChild.getAttribute("stroke-dasharray");
    const dash = dashes ? dashes.split(" ").map(Number) : undefined;
    return { swatch, dash, colour: () => getComputedStyle(swatch).stroke };
  };
  const styles = data.charts.length ? data.runs.map((_, run) => styleOf(run)) : [];
  const faint = colour => colour.replace("rgb(", "rgba(").replace(")", ", 0.3)");

  // The tables of a chart and how each is drawn.
  const layers = chart => {
    const overTime = at("axis").value === "time", share = Number(at("smoothing").value);
    const log = chart.loss && at("log").checked;
    const across = (run, steps) => overTime ? steps.map(step => timeOf(run, step)) : steps;
    const fit = values => log ? values.map(value => value !== null && value > 0 ? value : null) : values;
    const found = [];
    for (const each of chart.series) {
      const smooth = share > 0 && !each.marks && each.y.length >= 50;
      const { colour, dash } = styles[each.run];
      const raw = { stroke: smooth ? () => faint(colour()) : colour, width: 1.5, dash: smooth ? undefined : dash };
      const points = each.marks ? { show: true, size: 8, stroke: colour, fill: colour } : { size: 5, fill: colour };
      const options = { ...(each.marks ? { stroke: colour, width: 1, dash: [2, 4] } : raw), points };
      const x = across(each.run, each.x);
      found.push({ run: each.run, x, y: fit(each.y), options, marks: each.marks, behind: smooth });
      if (smooth) {
        const y = smoothed(fit(each.my || each.y), share), x = across(each.run, each.mx || each.x);
        const options = { stroke: colour, width: 2, dash, points: { show: false } };
        found.push({ run: each.run, x, y, smooth, options });
      }
    }
    return { found, log };
  };

  // The values below a chart's title: at the mark, or the last ones.
  const readout = (chart, parts, plot, box) => {
    const moved = plot.cursor.idx !== null && plot.cursor.idx !== undefined && plot.cursor.left >= 0;
    box.textContent = "";
    const where = document.createElement("span");
    const x = moved ? plot.data[0][plot.cursor.idx] : null;
    where.textContent = x === null ? "last" : at("axis").value === "time" ? clock(x) : `step ${short(x)}`;
    box.append(where);
    parts.forEach((part, place) => {
      if (!shown[part.run] || part.behind) return;
      const ys = plot.data[place + 1];
      let index = moved ? plot.cursor.idxs[place + 1] : ys.length - 1;
      while (index > 0 && (ys[index] === undefined || ys[index] === null)) index--;
      const value = index === null || index === undefined ? null : ys[index];
      if (value === null || value === undefined) return;
      const item = document.createElement("span");
      const kind = part.marks ? "evaluation " : part.smooth ? "mean " : "";
      item.append(styles[part.run].swatch.cloneNode(true), `${kind}${SHOW[chart.unit](value)}`);
      box.append(item);
    });
  };

  // A flat curve lies in the middle.
  const around = (_, min, max) => {
    if (min === null || min < max) return uPlot.rangeNum(min, max, 0.1, true);
    return min === 0 ? [0, 1] : [min - Math.abs(min) / 10, max + Math.abs(max) / 10];
  };

  const nearest = (plot, series, index) => {
    const ys = plot.data[series], xs = plot.data[0];
    let left = index, right = index;
    while (left >= 0 && ys[left] == null) left--;
    while (right < ys.length && ys[right] == null) right++;
    if (left < 0) return right < ys.length ? right : null;
    return right < ys.length && xs[right] - xs[index] < xs[index] - xs[left] ? right : left;
  };

  const show = range => {
    view = range;
    at("reset").disabled = view === null;
    const [min, max] = view || whole;
    for (const { plot } of charts) plot.setScale("x", { min, max });
  };
  const zoom = (factor, centre) => {
    const [min, max] = view || whole, middle = centre ?? (min + max) / 2;
    const range = [middle - (middle - min) * factor, middle + (max - middle) * factor];
    const all = range[0] <= whole[0] && range[1] >= whole[1];
    show(all ? null : [Math.max(whole[0], range[0]), Math.min(whole[1], range[1])]);
  };

  const build = (chart, figure) => {
    const { found: parts, log } = layers(chart);
    const box = figure.querySelector(".values"), place = figure.querySelector(".plot");
    const format = SHOW[chart.unit], overTime = at("axis").value === "time";
    const axis = {
      stroke: () => getComputedStyle(figure).color, ticks: { show: false }, font: "12px system-ui, sans-serif",
      grid: { stroke: () => getComputedStyle(figure).borderTopColor, width: 1 },
    };
    const plot = new uPlot({
      width: place.clientWidth, height: 230, legend: { show: false },
      scales: { x: { time: false, range: () => view || whole }, y: log ? { distr: 3 } : { range: around } },
      axes: [
        { ...axis, space: 64, incrs: overTime ? SECONDS : STEPS,
          values: (_, ticks) => ticks.map(overTime ? clock : short) },
        { ...axis, ...(chart.unit === "bytes" ? { incrs: BYTES } : {}),
          values: (_, ticks) => ticks.map(value => value === null ? "" : format(value)),
          size: (_, ticks) => Math.max(36, 14 + 6.6 * Math.max(0, ...(ticks || []).map(tick => tick.length))) },
      ],
      series: [{}, ...parts.map(part => ({ ...part.options, show: shown[part.run] }))],
      cursor: {
        y: false, drag: { x: true, y: false, setScale: false }, dataIdx: nearest, points: { size: 7 },
        sync: { key: "report", scales: ["x", null], filters: { pub: kind => MOVES.includes(kind) } },
        bind: { dblclick: () => () => { show(null); } },
      },
      hooks: {
        setCursor: [self => readout(chart, parts, self, box)],
        setSelect: [self => {
          if (self.select.width < 5) return;
          const range = [self.select.left, self.select.left + self.select.width].map(left => self.posToVal(left, "x"));
          self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          show(range);
        }],
      },
    }, uPlot.join(parts.map(part => [part.x, part.y])), place);
    readout(chart, parts, plot, box);
    return { plot, chart, parts, figure, update: () => readout(chart, parts, plot, box) };
  };

  const draw = () => {
    const ends = data.charts.flatMap(chart => layers(chart).found.map(part => part.x)).filter(x => x.length);
    whole = [Math.min(...ends.map(x => x[0])), Math.max(...ends.map(x => x[x.length - 1]))];
    if (!(whole[1] > whole[0])) whole = [whole[0] - 1, whole[0] + 1];
    const figures = charts.map(each => each.figure);
    for (const { plot } of charts) plot.destroy();
    view = null;
    at("reset").disabled = true;
    charts = data.charts.map((chart, number) => build(chart, figures[number] || figureOf(chart)));
    window.report = { charts, view: () => view };
  };

  const figureOf = chart => {
    const figure = document.createElement("figure"), title = document.createElement("figcaption");
    const values = document.createElement("div"), place = document.createElement("div");
    title.textContent = chart.title;
    values.className = "values";
    place.className = "plot";
    place.tabIndex = 0;
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", `${chart.title}, ${new Set(chart.series.map(each => each.run)).size} run(s)`);
    figure.append(title, values, place);
    at("charts").append(figure);
    place.addEventListener("keydown", event => {
      const { plot } = charts.find(each => each.figure === figure), xs = plot.data[0];
      const index = plot.cursor.left >= 0 ? plot.cursor.idx : null;
      const turn = { ArrowLeft: -1, ArrowRight: 1 }[event.key], factor = { "+": 0.5, "-": 2 }[event.key];
      if (event.key === "Escape") show(null);
      else if (factor) zoom(factor, index === null ? undefined : xs[index]);
      else if (turn) {
        const from = index === null ? (turn < 0 ? xs.length : -1) : index;
        const x = xs[Math.max(0, Math.min(xs.length - 1, from + turn))];
        plot.setCursor({ left: plot.valToPos(x, "x"), top: 10 }, true, true);
      } else return;
      event.preventDefault();
    });
    new ResizeObserver(() => {
      const found = charts.find(each => each.figure === figure);
      if (found && place.clientWidth > 0) found.plot.setSize({ width: place.clientWidth, height: 230 });
    }).observe(place);
    return figure;
  };

  const repaint = () => {
    for (const { plot } of charts) plot.redraw(false, true);
  };
  systemDark.addEventListener("change", repaint);
  at("theme").addEventListener("click", () => {
    const dark = root.style.colorScheme ? root.style.colorScheme === "dark" : systemDark.matches;
    root.style.colorScheme = dark ? "light" : "dark";
    repaint();
  });
  addEventListener("beforeprint", () => {
    for (const each of document.querySelectorAll("details")) each.open = true;
  });
  if (!data.charts.length) return;
  draw();
  for (const id of ["axis", "smoothing", "log"]) at(id).addEventListener("change", draw);
  at("reset").addEventListener("click", () => show(null));
  for (const key of document.querySelectorAll(".key")) {
    key.addEventListener("click", () => {
      const run = Number(key.dataset.run);
      shown[run] = !shown[run];
      key.setAttribute("aria-pressed", String(shown[run]));
      for (const { plot, parts, update } of charts) {
        parts.forEach((part, place) => { if (part.run === run) plot.setSeries(place + 1, { show: shown[run] }); });
        update();
      }
    });
  }
})();
