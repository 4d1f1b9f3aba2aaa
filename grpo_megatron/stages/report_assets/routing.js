// Metrics of routers by layer, as heat maps of steps and layers.

/** Layers that have values of a routing quantity, ascending, by the quantity's name. */
function routedLayers(run) {
  const layers = {};
  for (const [name, values] of Object.entries(run.metrics)) {
    const found = name.match(/^routing\/(.+)\/layer_(\d+)$/);
    if (!found || !values.some(isNumber)) continue;
    const [, quantity, layer] = found;
    if (!layers[quantity]) layers[quantity] = [];
    layers[quantity].push(Number(layer));
  }
  for (const ofQuantity of Object.values(layers)) {
    ofQuantity.sort((a, b) => a - b);
  }
  return layers;
}

/** Columns of the map as {row, name}: a row of the metrics each, and one of row null wherever
 *  steps are missing. */
function mapColumns(run) {
  const { step: steps } = run.metrics;
  const columns = [];
  steps.forEach((step, row) => {
    for (const [before, after, name] of run.gaps) {
      const isHere = row > 0 && steps[row - 1] <= before && after <= step;
      if (isHere) columns.push({ row: null, name });
    }
    columns.push({ row, name: "step " + step });
  });
  return columns;
}

/** The heat map of a quantity; layers: those that have it. */
function routingMap(run, quantity, layers) {
  const columns = mapColumns(run);
  const cells = layers.map(layer => {
    const values = run.metrics[`routing/${quantity}/layer_${layer}`];
    return columns.map(({ row }) => (row === null ? null : values[row]));
  });
  const rowNames = layers.map(layer => "layer " + layer);
  const columnNames = columns.map(column => column.name);
  return heatMap(rowNames, columnNames, cells, "routing/" + quantity);
}

/** Routing by layer, of a quantity by choice; or the word that the run has none. */
function routingOf(run) {
  const layers = routedLayers(run);
  const names = Object.keys(layers).sort();
  if (!names.length) {
    return absence("Routing by layer: the run has no metric routing/…/layer_N.");
  }
  const place = el("div");
  const draw = () => {
    const quantity = select.value;
    place.replaceChildren(routingMap(run, quantity, layers[quantity]));
  };
  const options = names.map(name => el("option", null, name));
  const select = el("select", { "aria-label": "quantity", change: draw }, options);
  select.value = names.find(name => name.includes("slot_flip_rate")) || names[0];
  draw();
  const head = el("div", { class: "head" }, el("h4", null, "Routing by layer"), select);
  return el("figure", null, head, place);
}
