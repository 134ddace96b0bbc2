// Draws one of many maps over an image. DATA and ID are filled in by browse.py.
(() => {
const d = DATA;
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
const codes = bytes(d.codes), lut = bytes(d.lut);
const value = c => d.low + (c - 1) / 254 * (d.high - d.low);
const start = root => {
  root.dataset.ready = 1;
  const slider = root.querySelector("input"), name = root.querySelector("b"), tip = root.querySelector("i");
  const canvases = [...root.querySelectorAll("canvas")], images = d.panels.map(p => Object.assign(new Image(), {src: p.image}));
  const draw = () => {
    name.textContent = d.names[slider.value];
    d.panels.forEach((p, k) => {
      const g = canvases[k].getContext("2d"), s = canvases[k].width / (p.box[2] - p.box[0]);
      g.setTransform(s, 0, 0, s, -p.box[0] * s, -p.box[1] * s);
      g.fillStyle = "#e4e7ec"; g.fillRect(p.box[0], p.box[1], p.box[2] - p.box[0], p.box[3] - p.box[1]);
      g.drawImage(images[k], 0, 0, p.size[0], p.size[1]);
      for (const v of p.views) {
        const [x0, y0, x1, y1] = v.box, heat = new ImageData(v.columns, v.rows);
        for (let i = 0; i < v.rows * v.columns; i++) {
          const c = codes[slider.value * d.count + v.first + i];
          heat.data.set([lut[3 * c], lut[3 * c + 1], lut[3 * c + 2], c ? 184 : 0], 4 * i);
        }
        const cells = Object.assign(document.createElement("canvas"), {width: v.columns, height: v.rows});
        cells.getContext("2d").putImageData(heat, 0, 0);
        g.imageSmoothingEnabled = false;
        g.drawImage(cells, x0, y0, x1 - x0, y1 - y0);
        g.imageSmoothingEnabled = true;
        g.strokeStyle = p.views.length > 1 ? "#ffb000" : "#667085";
        g.lineWidth = 1.5 / s; g.strokeRect(x0, y0, x1 - x0, y1 - y0);
      }
    });
  };
  canvases.forEach((canvas, k) => canvas.onmousemove = event => {
    const p = d.panels[k], r = canvas.getBoundingClientRect();
    const x = p.box[0] + (event.clientX - r.left) / r.width * (p.box[2] - p.box[0]);
    const y = p.box[1] + (event.clientY - r.top) / r.height * (p.box[3] - p.box[1]);
    for (const v of p.views) {
      const column = Math.floor((x - v.box[0]) / (v.box[2] - v.box[0]) * v.columns);
      const row = Math.floor((y - v.box[1]) / (v.box[3] - v.box[1]) * v.rows);
      if (row < 0 || column < 0 || row >= v.rows || column >= v.columns) continue;
      const at = v.first + row * v.columns + column, c = codes[slider.value * d.count + at];
      tip.textContent = `${v.name} cell[${row},${column}] position ${d.positions[at]}: ${c ? value(c).toPrecision(3) : "missing"}`;
    }
  });
  slider.oninput = draw;
  images.forEach(image => image.decode().then(draw));
};
document.querySelectorAll("[data-sightlens='ID']:not([data-ready])").forEach(start);
})();
