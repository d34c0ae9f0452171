// The page of `allmlp serve`: a form for the endpoint of a served model, its token-mixing weights and attention.

const $ = (id) => document.getElementById(id);
const MAX_ATTEMPTS = 3;
const SMALL = 64; // smaller images are shown without interpolation
const NO_CONNECTION = "The server does not respond. Is it still running?";
let model = null;
let lastRequest = null; // repeated by "Retry"
let requestId = 0; // responses to older requests are dropped
let attended = null; // the last image or text, as a request for its attention

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

const api = (path) => `${model.path}/${path}`;
const percent = (fraction) => `${(100 * fraction).toFixed(fraction < 0.0995 ? 2 : 1)} %`;

// --- requests ---------------------------------------------------------------------------------------------------------

class RequestError extends Error {
  constructor(message, retryable = true) {
    super(message);
    this.retryable = retryable; // an invalid request stays invalid
  }
}

/** Send a request and return its JSON; retry after Retry-After seconds if the server is busy. */
async function request(path, options = {}, say = () => {}) {
  for (let attempt = 1; ; attempt++) {
    let response;
    try {
      response = await fetch(path, options);
    } catch {
      throw new RequestError(NO_CONNECTION);
    }
    if (response.ok) return response.json();
    const error = await response.json().catch(() => ({}));
    const after = Number(response.headers.get("retry-after"));
    if (response.status !== 503 || attempt === MAX_ATTEMPTS) {
      throw new RequestError(error.detail || `The server returned ${response.status}.`, response.status >= 500);
    }
    say(`The server is busy. Retrying in ${after || 1} s (${attempt} of ${MAX_ATTEMPTS - 1}) …`);
    await new Promise((done) => setTimeout(done, 1000 * (after || 1)));
  }
}

/** Send a request and show its progress, then the result with its timing, or the error. */
async function submit(send, show) {
  const id = ++requestId;
  lastRequest = () => submit(send, show);
  $("error").hidden = true;
  $("status").hidden = false;
  $("output").setAttribute("aria-busy", "true");
  const say = (text) => { if (id === requestId) $("status").textContent = text; };
  say("Running …");
  const start = performance.now();
  try {
    const response = await send(say);
    if (id !== requestId) return;
    const total_ms = performance.now() - start;
    $("result").replaceChildren();
    say(show(response) || "");
    showTiming({ ...response.timing, total_ms });
    scrollToOutput();
  } catch (error) {
    if (id !== requestId) return;
    if (!(error instanceof RequestError)) console.error(error);
    showError(error instanceof RequestError ? error.message : "The page could not show the result.", error.retryable);
  } finally {
    if (id === requestId) $("output").removeAttribute("aria-busy");
  }
}

/** On a phone the result is below the form. */
function scrollToOutput() {
  if (matchMedia("(max-width: 760px)").matches) $("output").scrollIntoView({ block: "nearest" });
}

function showError(message, retryable = false) {
  $("result").replaceChildren();
  $("timing").hidden = true;
  $("status").textContent = "";
  $("status").hidden = true;
  $("error").hidden = false;
  $("error").querySelector("p").textContent = message.charAt(0).toUpperCase() + message.slice(1);
  $("retry").hidden = !retryable;
  scrollToOutput();
}

function showTiming(timing) {
  for (const cell of $("timing").querySelectorAll("dd")) {
    const value = timing[cell.dataset.time];
    cell.textContent = cell.dataset.time.endsWith("_ms") ? `${value.toFixed(value < 10 ? 1 : 0)} ms` : value;
  }
  $("timing").hidden = false;
}

/** A bar chart of [label, probability] pairs. */
function bars(predictions, choose) {
  const list = element("ol", { className: "bars" });
  for (const [label, probability] of predictions) {
    const fill = element("span", { className: "fill" });
    fill.style.width = `${100 * probability}%`;
    const inside = [
      element("span", { className: "label" }, label),
      element("span", { className: "probability" }, percent(probability)),
      element("span", { className: "track", ariaHidden: "true" }, fill),
    ];
    const row = choose
      ? element("button", { type: "button", ariaPressed: "false", onclick: () => choose(label), title: `Show the important patches for ${label}` }, ...inside)
      : element("div", {}, ...inside);
    row.dataset.label = label;
    list.append(element("li", {}, row));
  }
  return list;
}

// --- images -----------------------------------------------------------------------------------------------------------

let image = null; // the selected file
let importanceLabel = null; // the class whose important patches are shown

function startImages(samples) {
  $("image").hidden = false;
  const [height, width] = model.img_size;
  $("stage").style.aspectRatio = `${width} / ${height}`;
  for (const { label, url } of samples.images) {
    const button = element("button", { type: "button", ariaPressed: "false", title: label }, element("img", { src: url, alt: `Sample: ${label}`, onload: ({ target }) => target.classList.toggle("pixels", target.naturalWidth < SMALL) }));
    button.onclick = async () => {
      const data = await fetch(url).then((response) => response.blob()).catch(() => null);
      if (data) classifyImage(data, button);
      else showError(NO_CONNECTION);
    };
    $("samples").append(element("li", {}, button));
  }
  $("file").onchange = () => { classifyFiles([...$("file").files]); $("file").value = ""; };
  const stage = $("stage");
  stage.ondragover = (event) => { event.preventDefault(); stage.classList.add("over"); };
  stage.ondragleave = () => stage.classList.remove("over");
  // The browser would navigate to a file dropped elsewhere on the page.
  document.ondragover = (event) => event.preventDefault();
  document.ondrop = (event) => {
    event.preventDefault();
    stage.classList.remove("over");
    classifyFiles([...event.dataTransfer.files]);
  };
  document.onpaste = (event) => {
    classifyFiles([...event.clipboardData.files].filter((one) => one.type.startsWith("image/")));
  };
  $("show-importance").onchange = () => { if (image) showImportance(importanceLabel); };
}

/** One image with its important patches, or a gallery of several. */
function classifyFiles(files) {
  if (files.length === 1) classifyImage(files[0]);
  else if (files.length) classifyMany(files);
}

/** Files in groups that fit into one request; those that do not are left out. */
function* groups(files) {
  const room = model.max_body_bytes - 2 ** 12; // for the form around them
  let group = [];
  let size = 0;
  for (const file of files.filter((one) => one.size + 2 ** 9 <= room)) {
    if (group.length === model.max_inputs || size + file.size + 2 ** 9 > room) {
      yield group;
      [group, size] = [[], 0];
    }
    group.push(file);
    size += file.size + 2 ** 9;
  }
  if (group.length) yield group;
}

async function classifyMany(files) {
  for (const button of $("samples").querySelectorAll("button")) button.ariaPressed = "false";
  image = null;
  clearImportance();
  $("stage").classList.add("empty");
  const send = async (say) => {
    const results = new Map(files.map((file) => [file, { error: `larger than ${model.max_body_bytes / 2 ** 20} MB` }]));
    let timing = null;
    let done = 0;
    for (const group of groups(files)) {
      const form = new FormData();
      for (const file of group) form.append("files", file, file.name);
      const response = await request(api("predict?top_k=1"), { method: "POST", body: form }, say);
      group.forEach((file, index) => results.set(file, response.results[index]));
      timing = response.timing;
      done += group.length;
      say(`${done} of ${files.length} images …`);
    }
    if (!timing) throw new RequestError(`The files are larger than ${model.max_body_bytes / 2 ** 20} MB.`, false);
    return { results, timing };
  };
  await submit(send, ({ results }) => {
    const gallery = element("ul", { className: "gallery" });
    const counts = new Map();
    for (const [file, { predictions, error }] of results) {
      const url = URL.createObjectURL(file);
      const shown = element("img", { src: url, alt: "", onload: () => URL.revokeObjectURL(url), onerror: () => URL.revokeObjectURL(url) });
      const words = error ? element("span", { className: "wrong" }, error)
        : element("span", {}, element("b", {}, predictions[0].label), ` ${percent(predictions[0].probability)}`);
      const tile = element("button", { type: "button", title: file.name, onclick: () => classifyImage(file) }, shown, words, element("span", { className: "name" }, file.name));
      gallery.append(element("li", {}, tile));
      const label = error ? "not read" : predictions[0].label;
      counts.set(label, (counts.get(label) || 0) + 1);
    }
    $("result").append(gallery);
    const listed = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 5).map(([label, count]) => `${count} ${label}`);
    return `${results.size} images: ${listed.join(", ")}${counts.size > 5 ? ", …" : ""}`;
  });
}

async function classifyImage(file, sample = null) {
  if (!file) return;
  for (const button of $("samples").querySelectorAll("button")) button.ariaPressed = String(button === sample);
  image = null;
  clearImportance();
  await preview(file);
  if (file.size > model.max_body_bytes) {
    requestId++;
    showError(`The file has ${(file.size / 2 ** 20).toFixed(1)} MB; the server accepts at most ${model.max_body_bytes / 2 ** 20} MB.`);
    return;
  }
  image = file;
  showAttention({ method: "POST", body: file, headers: { "content-type": "application/octet-stream" } });
  const send = (say) => request(api("predict?top_k=5"), { method: "POST", body: file, headers: { "content-type": "application/octet-stream" } }, say);
  await submit(send, ({ predictions }) => {
    const [{ label, probability }] = predictions;
    $("result").append(bars(labels(predictions), showImportance));
    showImportance(label);
    $("preview").setAttribute("aria-label", `The image, classified as ${label}`);
    return `${label}, ${percent(probability)}`;
  });
}

/** Show the part of the image that the model sees: a center crop of its aspect ratio. */
async function preview(file) {
  const canvas = $("preview");
  const stage = $("stage");
  canvas.setAttribute("aria-label", "The image");
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    stage.classList.add("empty"); // not an image, or a format that only the server can decode
    return;
  }
  const [height, width] = model.img_size;
  const scale = Math.min(bitmap.width / width, bitmap.height / height) * model.crop_pct;
  const [wide, high] = [width * scale, height * scale];
  const enlarge = Math.min(840 / wide, 840 / high, 1);
  canvas.width = Math.max(Math.round(wide * enlarge), 1);
  canvas.height = Math.max(Math.round(high * enlarge), 1);
  stage.classList.toggle("pixels", wide < SMALL);
  canvas.getContext("2d").drawImage(bitmap, (bitmap.width - wide) / 2, (bitmap.height - high) / 2, wide, high, 0, 0, canvas.width, canvas.height);
  stage.classList.remove("empty");
}

function clearImportance() {
  importanceLabel = null;
  $("overlay").style.opacity = 0;
  $("importance-text").textContent = "";
}

/** Darken the patches that matter little for a class. */
async function showImportance(label) {
  importanceLabel = label;
  for (const row of $("result").querySelectorAll("[data-label]")) row.ariaPressed = String(row.dataset.label === label && $("show-importance").checked);
  if (!label || !$("show-importance").checked) {
    $("overlay").style.opacity = 0;
    $("importance-text").textContent = "";
    return;
  }
  const file = image;
  try {
    const path = api(`importance?label=${encodeURIComponent(label)}`);
    const { importance } = await request(path, { method: "POST", body: file, headers: { "content-type": "application/octet-stream" } });
    if (file !== image || label !== importanceLabel || !$("show-importance").checked) return;
    const largest = Math.max(...importance.flat());
    drawImportance(importance, largest);
    $("importance-text").textContent = largest > 0 ? `Bright patches matter most for ${label}.` : `No patch supports ${label}.`;
  } catch (error) {
    if (file === image) $("importance-text").textContent = error.message;
  }
}

function drawImportance(rows, largest) {
  const canvas = $("overlay");
  const context = canvas.getContext("2d");
  [canvas.height, canvas.width] = [rows.length, rows[0].length];
  const pixels = context.createImageData(canvas.width, canvas.height);
  const brightness = (value) => (largest > 0 ? Math.sqrt(Math.max(value / largest, 0)) : 0);
  rows.flat().forEach((value, index) => pixels.data.set([8, 10, 30, 215 * (1 - brightness(value))], 4 * index));
  context.putImageData(pixels, 0, 0);
  canvas.style.opacity = 1;
}

// --- text -------------------------------------------------------------------------------------------------------------

// The fields of each endpoint's request, with their labels.
const FORMS = {
  fill: { fields: { text: "Text with [MASK]" }, button: "Fill in" },
  classify: { fields: { text: "Text", text_pair: "Second text (optional)" }, button: "Classify" },
  answer: { fields: { question: "Question", context: "Context" }, button: "Find the answer" },
  translate: { fields: { text: "Text" }, button: "Translate" },
  generate: { fields: { prompt: "Prompt" }, button: "Generate" },
  forecast: { fields: { table: "Past values" }, button: "Forecast" },
};

function startText(samples, endpoint) {
  const { fields, button } = FORMS[endpoint];
  const [first, second] = Object.keys(fields);
  $("text").hidden = false;
  const pair = endpoint === "classify" && model.text_columns.length > 1;
  $("first-label").textContent = pair ? `First text (${model.text_columns[0]})` : fields[first];
  $("submit").textContent = button;
  $("first").required = endpoint !== "generate";
  if (second) {
    $("second-field").hidden = false;
    $("second-label").textContent = pair ? `Second text (${model.text_columns[1]})` : fields[second];
    $("second").required = endpoint === "answer";
  }
  if (endpoint === "forecast") {
    $("text-title").textContent = "Series";
    $("first-label").textContent = `Past values, the oldest first, as a table with the columns ${model.columns.join(", ")} and perhaps times`;
    $("first").rows = 10;
    $("first").maxLength = model.max_body_bytes;
  }
  $("sample-heading").hidden = !samples.texts.length;
  $("insert-mask").hidden = endpoint !== "fill";
  $("insert-mask").onclick = () => {
    const field = $("first");
    field.setRangeText("[MASK]", field.selectionStart, field.selectionEnd, "end");
    field.focus();
  };
  for (const sample of samples.texts) {
    const choice = element("button", { type: "button" }, pair ? `${sample[first]} ${sample[second]}` : sample[first]);
    choice.onclick = () => {
      $("first").value = sample[first];
      $("second").value = sample[second] || "";
      submitText(endpoint);
    };
    $("sample-texts").append(element("li", {}, choice));
  }
  $("text-form").onsubmit = (event) => { event.preventDefault(); submitText(endpoint); };
  $("first").onkeydown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("text-form").requestSubmit();
  };
}

function submitText(endpoint) {
  const [first, second] = Object.keys(FORMS[endpoint].fields);
  const body = { [first]: $("first").value };
  if (second) body[second] = $("second").value;
  if (endpoint === "forecast") return submit(async (say) => {
    const series = seriesBody(body.table);
    const response = await request(api(endpoint), { method: "POST", body: JSON.stringify(series), headers: { "content-type": "application/json" } }, say);
    return { ...response, past: series.columns };
  }, SHOW.forecast);
  if (body[first].trim()) showAttention({ method: "POST", body: JSON.stringify({ text: body[first], text_pair: body[second] || "" }), headers: { "content-type": "application/json" } });
  const send = (say) => request(api(endpoint), { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" } }, say);
  return submit(send, (response) => SHOW[endpoint](response, body));
}

/** A table of past values of one series as a request: columns of numbers, the time of the last row, and the id. */
function seriesBody(text) {
  const lines = text.trim().split(/\r?\n/);
  const separator = ["\t", ";", ","].find((mark) => lines[0].includes(mark)) ?? ",";
  const rows = lines.map((line) => line.split(separator).map((cell) => cell.trim()));
  const header = rows[0].some((cell) => model.columns.includes(cell)) ? rows.shift() : model.columns;
  if (!rows.length) throw new RequestError("The table has no values.", false);
  const number = (cell) => {
    if (!cell) return null;
    if (Number.isNaN(Number(cell))) throw new RequestError(`"${cell}" is not a number.`, false);
    return Number(cell);
  };
  const cells = (name) => rows.map((row) => row[header.indexOf(name)] ?? "");
  const columns = {};
  for (const name of model.columns) if (header.includes(name)) columns[name] = cells(name).map(number);
  const parts = model.id_columns.every((name) => header.includes(name)) ? model.id_columns.map(cells) : [];
  const escaped = (cell) => (parts.length > 1 ? cell.replace(/[\\/]/g, "\\$&") : cell);
  const ids = new Set(rows.map((_, place) => parts.map((part) => escaped(part[place])).join("/")));
  if (ids.size > 1) throw new RequestError(`The table has ${ids.size} series, such as ${[...ids].slice(0, 2).join(" and ")}. Keep the rows of one.`, false);
  const others = header.filter((name) => ![...model.columns, ...model.id_columns].includes(name));
  const time = others.includes(model.time_column) ? model.time_column : others.find((name) => new Set(cells(name)).size === rows.length);
  return { columns, last_time: time === undefined ? "" : cells(time).at(-1), id: [...ids][0] };
}

/** Past values, forecast, and a band between the outermost quantiles. */
function chart(past, { forecast, quantiles }) {
  const shown = past.slice(-3 * forecast.length);
  const levels = Object.keys(quantiles).sort((a, b) => a - b);
  const [low, high] = levels.length > 1 ? [quantiles[levels[0]], quantiles[levels.at(-1)]] : [[], []];
  const all = [...shown, ...forecast, ...low, ...high].filter((value) => value !== null);
  const [least, most] = [Math.min(...all), Math.max(...all)];
  const width = shown.length + forecast.length - 1 || 1;
  const x = (step) => (600 * step / width).toFixed(1);
  const y = (value) => (190 - 180 * (value - least) / (most - least || 1)).toFixed(1);
  const path = (values, start) => values.map((value, step) => (value === null ? "" : `${step && values[step - 1] !== null ? "L" : "M"}${x(start + step)} ${y(value)}`)).join("");
  const points = (values) => values.map((value, step) => `${x(shown.length + step)},${y(value)}`);
  const last = shown.at(-1) ?? forecast[0];
  const figure = element("div", { className: "chart" });
  figure.innerHTML = `<svg viewBox="0 0 600 200" role="img" aria-label="Past values and forecast">
    <polygon class="band" points="${[...points(high), ...points(low).reverse()].join(" ")}"/>
    <path class="past" d="${path(shown, 0)}"/><path class="forecast" d="${path([last, ...forecast], shown.length - 1)}"/></svg>`;
  return figure;
}

const labels = (predictions) => predictions.map(({ label, probability }) => [label, probability]);

const SHOW = {
  fill({ predictions }, { text }) {
    const parts = text.split("[MASK]");
    const line = element("p", { className: "filled" }, parts[0]);
    predictions.forEach(([{ token }], index) => line.append(element("mark", {}, token), parts[index + 1] ?? ""));
    $("result").append(line);
    predictions.forEach((tokens, index) => {
      if (predictions.length > 1) $("result").append(element("h3", {}, `[MASK] ${index + 1}`));
      $("result").append(bars(tokens.map(({ token, probability }) => [token, probability])));
    });
    const [[{ token, probability }]] = predictions;
    return predictions.length > 1 ? `${predictions.length} tokens predicted` : `${token}, ${percent(probability)}`;
  },
  classify({ predictions }) {
    $("result").append(bars(labels(predictions)));
    return `${predictions[0].label}, ${percent(predictions[0].probability)}`;
  },
  answer({ answers }, { context }) {
    if (!answers.length) return "No answer found.";
    const [{ answer, probability, start, end }] = answers;
    // The server counts code points, JavaScript UTF-16 units.
    const characters = [...context];
    const slice = (from, to) => characters.slice(from, to).join("");
    $("result").append(
      element("p", { className: "filled" }, slice(0, start), element("mark", {}, slice(start, end)), slice(end)),
      bars(answers.map((found) => [found.answer, found.probability])),
    );
    return `${answer}, ${percent(probability)}`;
  },
  translate({ text }) {
    $("result").append(element("p", { className: "generated" }, text));
    return "Translation";
  },
  forecast({ times, columns, past }) {
    for (const [name, column] of Object.entries(columns)) $("result").append(element("h3", {}, name), chart(past[name], column));
    const names = Object.keys(columns);
    const steps = columns[names[0]].forecast.map((_, step) => [times[step] ?? `+${step + 1}`, ...names.map((name) => columns[name].forecast[step].toPrecision(5))]);
    const line = (cells, kind) => element("tr", {}, ...cells.map((cell) => element(kind, {}, cell)));
    const table = element("table", {}, line([times.length ? "Time" : "Step", ...names], "th"), ...steps.map((cells) => line(cells, "td")));
    $("result").append(element("details", {}, element("summary", {}, "Values"), table));
    return `${steps.length} steps`;
  },
  generate({ text }) {
    $("result").append(element("p", { className: "generated" }, text));
    return "Generated text";
  },
};

// --- token-mixing and attention maps ----------------------------------------------------------------------------------

let maps = null;
let selected = null; // initially the map in the middle

function startMaps() {
  if (!model.layers.length) return;
  $("mixing").hidden = false;
  const attends = model.layers.filter(({ kind }) => kind === "attention").length;
  if (attends) $("mixing-title").textContent = attends === model.layers.length ? "Attention" : "Token-mixing weights and attention";
  $("layer").max = model.layers.length - 1;
  $("layer").oninput = loadMaps;
  const mosaic = $("mosaic");
  const point = (event) => {
    if (!maps) return;
    const box = mosaic.getBoundingClientRect();
    const column = Math.min(Math.max(Math.floor((event.clientX - box.left) / box.width * maps.columns), 0), maps.columns - 1);
    const row = Math.min(Math.max(Math.floor((event.clientY - box.top) / box.height * maps.rows), 0), maps.rows - 1);
    selectMap(row * maps.columns + column);
  };
  mosaic.onpointermove = point;
  mosaic.onpointerdown = point;
  mosaic.onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -maps?.columns, ArrowDown: maps?.columns }[event.key];
    if (!maps || !step) return;
    event.preventDefault();
    selectMap(selected + step);
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMaps);
  loadMaps();
}

/** Keep the input, and show its attention if such a layer is selected. */
function showAttention(input) {
  attended = input;
  if (model.layers[Number($("layer").value)]?.kind === "attention") loadMaps();
}

async function loadMaps() {
  const index = Number($("layer").value);
  const { name, kind } = model.layers[index];
  $("layer-name").textContent = `${index + 1} of ${model.layers.length}`;
  $("layer").setAttribute("aria-valuetext", `${index + 1} of ${model.layers.length}: ${name}`);
  const input = kind === "attention" ? attended : {};
  document.querySelector(".maps").hidden = !input;
  if (!input) {
    maps = null;
    $("mixing-text").textContent = `Attention depends on the input: ${model.endpoint === "predict" ? "choose an image" : "enter a text"} above.`;
    return;
  }
  try {
    const found = await request(api(`${kind === "attention" ? "attention" : "maps"}?layer=${encodeURIComponent(name)}`), input);
    if (Number($("layer").value) !== index || (kind === "attention" && input !== attended)) return;
    const values = Int8Array.from(atob(found.data), (character) => character.charCodeAt(0));
    // The rows of a matrix over patches are arranged like the patches.
    const columns = found.kind === "matrix" && found.count === found.height * found.width ? found.width : Math.ceil(Math.sqrt(found.count));
    maps = { ...found, values, columns, rows: Math.ceil(found.count / columns) };
    const middle = Math.floor(maps.rows / 2) * columns + Math.floor(columns / 2);
    selected = Math.min(selected ?? middle, maps.count - 1);
    drawMaps();
  } catch (error) {
    maps = null;
    $("mixing-text").textContent = error.message;
  }
}

function selectMap(index) {
  if (index < 0 || index >= maps.count || index === selected) return;
  selected = index;
  drawMaps();
}

const KINDS = {
  matrix: "Each tile shows the weights of one output patch over all input patches.",
  units: "Each tile shows the input weights of one hidden unit of the token-mixing MLP, sorted by spatial frequency.",
  "class row": "The weights of the class token over all patches.",
  kernels: "The kernels of the convolution over patches.",
  attention: "Each tile shows one head: how much the output attends to each patch of the image.",
};

function drawMaps() {
  if (!maps) return;
  const { count, height, width, columns, rows, kind, scale } = maps;
  const single = count === 1;
  const text = single && kind === "matrix";
  const tokens = maps.column_tokens?.length;
  $("mixing-text").textContent = text ? "Row i holds the weights of output token i over all input tokens."
    : tokens ? `Each tile shows one head: row i is what token i attends to. Most attended: ${mostAttended().join(", ")}.` : KINDS[kind];
  document.querySelector(".maps").classList.toggle("single", single);
  const gap = single ? 0 : 1;
  const canvas = $("mosaic");
  canvas.tabIndex = single ? -1 : 0;
  canvas.width = columns * (width + gap) + gap;
  canvas.height = rows * (height + gap) + gap;
  canvas.setAttribute("aria-label", `Weights of ${maps.layer}: ${count} ${count === 1 ? "map" : "maps, select one with the arrow keys"}`);
  const context = canvas.getContext("2d");
  const colors = palette();
  const left = (index) => (index % columns) * (width + gap) + gap;
  const top = (index) => Math.floor(index / columns) * (height + gap) + gap;
  if (!single) {
    context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
    context.fillRect(left(selected) - 1, top(selected) - 1, width + 2, height + 2);
  }
  for (let index = 0; index < count; index++) context.putImageData(paint(context, index, colors), left(index), top(index));
  if (single) return;
  const detail = $("detail");
  [detail.width, detail.height] = [width, height];
  detail.getContext("2d").putImageData(paint(detail.getContext("2d"), selected, colors), 0, 0);
  const patches = kind === "matrix" && count === height * width;
  const title = kind === "attention" ? `Head ${selected + 1} of ${count}` : patches ? `Output patch (${Math.floor(selected / width) + 1}, ${(selected % width) + 1})` : `Map ${selected + 1} of ${count}`;
  const part = maps.values.subarray(selected * height * width, (selected + 1) * height * width);
  const strongest = part.reduce((best, value, index) => (Math.abs(value) > Math.abs(part[best]) ? index : best), 0);
  const weight = (part[strongest] * scale).toPrecision(2);
  if (tokens) $("detail-text").textContent = `Head ${selected + 1} of ${count}: largest weight ${weight}, from ${maps.row_tokens[Math.floor(strongest / width)]} to ${maps.column_tokens[strongest % width]}.`;
  else $("detail-text").textContent = kind === "kernels" ? `${title}: largest weight ${weight}.`
    : `${title}: largest weight ${weight} at input patch (${Math.floor(strongest / width) + 1}, ${(strongest % width) + 1}).`;
  detail.setAttribute("aria-label", $("detail-text").textContent);
}

/** The three tokens with the largest sum of weights over all rows and heads. */
function mostAttended() {
  const { values, width, column_tokens } = maps;
  const sums = column_tokens.map(() => 0);
  values.forEach((value, cell) => { sums[cell % width] += value; });
  return column_tokens.map((token, index) => [sums[index], token]).sort((a, b) => b[0] - a[0]).slice(0, 3).map(([, token]) => token);
}

/** Colors of the 256 int8 values, from the light or dark theme of the page. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim().match(/[\da-f]{2}/gi).map((part) => parseInt(part, 16));
  const [zero, plus, minus] = ["--zero", "--plus", "--minus"].map(read);
  return Array.from({ length: 256 }, (_, byte) => {
    const value = (byte < 128 ? byte : byte - 256) / 127;
    const strength = Math.min(Math.abs(value) ** 0.7, 1); // small weights stay visible
    const end = value < 0 ? minus : plus;
    return zero.map((from, channel) => Math.round(from + (end[channel] - from) * strength));
  });
}

function paint(context, index, colors) {
  const { height, width, values } = maps;
  const pixels = context.createImageData(width, height);
  const start = index * height * width;
  for (let cell = 0; cell < height * width; cell++) pixels.data.set([...colors[values[start + cell] & 255], 255], 4 * cell);
  return pixels;
}

// --- start ------------------------------------------------------------------------------------------------------------

async function checkHealth() {
  const pill = $("health");
  const { status } = await fetch("health").then((response) => response.json()).catch(() => ({}));
  const text = { ok: "ready", draining: "shutting down" }[status] || "not responding";
  if (pill.textContent !== text) pill.textContent = text; // screen readers announce every change
  pill.className = `pill ${status === "ok" ? "ok" : "bad"}`;
}

/** A choice of model reloads the page, so that its address can be kept. */
function offerModels(models) {
  if (models.length < 2) return;
  $("models").hidden = false;
  $("model").append(...models.map(({ name }) => element("option", { value: name, selected: name === model.name }, name)));
  $("model").onchange = () => { location.search = `?model=${encodeURIComponent($("model").value)}`; };
}

async function start() {
  $("retry").onclick = () => lastRequest && lastRequest();
  try {
    const models = await request("models");
    const chosen = new URLSearchParams(location.search).get("model");
    model = models.find(({ name }) => name === chosen) || models[0];
    offerModels(models);
    const samples = await request(api("samples"));
    $("title").textContent = model.name;
    document.title = `${model.name} · allmlp`;
    const facts = [`${(model.num_parameters / 1e6).toFixed(2)} M parameters`, model.input_spec.replace("x", "×")];
    if (model.class_names.length) facts.push(`${model.class_names.length} classes`);
    $("facts").textContent = facts.join(" · ");
    $("version").textContent = `allmlp ${model.version}`;
    if (model.endpoint === "predict") startImages(samples);
    else startText(samples, model.endpoint);
    startMaps();
  } catch (error) {
    $("facts").textContent = "";
    showError(error.message);
  }
  checkHealth();
  setInterval(checkHealth, 10_000);
}

start();
