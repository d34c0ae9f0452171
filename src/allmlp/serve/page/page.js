// The page of `allmlp serve`: asks the server for its model and shows what that model can do.

const $ = (id) => document.getElementById(id);
const TRIES = 3;
const SMALL = 64; // pictures of fewer pixels a side are shown pixel by pixel
let model = null;
let lastAsk = null; // what "Try again" repeats
let turn = 0; // answers to an older question are thrown away

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 2 : 1)} %`;

// --- asking -----------------------------------------------------------------------------------------------------------

class Problem extends Error {
  constructor(message, repeatable = true) {
    super(message);
    this.repeatable = repeatable; // what is wrong with the question stays wrong
  }
}

/** A request to the server; a busy one is asked again when it says so. */
async function ask(path, options = {}, say = () => {}) {
  for (let attempt = 1; ; attempt++) {
    let response;
    try {
      response = await fetch(path, options);
    } catch {
      throw new Problem("The server does not answer. Is it still running?");
    }
    if (response.ok) return response.json();
    const told = await response.json().catch(() => ({}));
    const after = Number(response.headers.get("retry-after"));
    if (response.status !== 503 || attempt === TRIES) {
      throw new Problem(told.detail || `The server answered ${response.status}.`, response.status >= 500);
    }
    say(`The server is busy. Trying again in ${after || 1} s (${attempt} of ${TRIES - 1}) …`);
    await new Promise((done) => setTimeout(done, 1000 * (after || 1)));
  }
}

/** Ask, and show that it is being asked, how long it took, or what went wrong. */
async function question(task, show) {
  const mine = ++turn;
  lastAsk = () => question(task, show);
  $("problem").hidden = true;
  $("status").hidden = false;
  $("answer").setAttribute("aria-busy", "true");
  const say = (text) => { if (mine === turn) $("status").textContent = text; };
  say("Asking …");
  const began = performance.now();
  try {
    const answer = await task(say);
    if (mine !== turn) return;
    const trip = performance.now() - began;
    $("result").replaceChildren();
    say(show(answer) || "");
    showTiming(answer.timing, trip);
    comeIntoView();
  } catch (reason) {
    if (mine !== turn) return;
    if (!(reason instanceof Problem)) console.error(reason);
    fail(reason instanceof Problem ? reason.message : "The page could not show the answer.", reason.repeatable);
  } finally {
    if (mine === turn) $("answer").removeAttribute("aria-busy");
  }
}

/** On a phone the answer lies below the question. */
function comeIntoView() {
  if (matchMedia("(max-width: 760px)").matches) $("answer").scrollIntoView({ block: "nearest" });
}

function fail(message, repeatable = false) {
  $("result").replaceChildren();
  $("timing").hidden = true;
  $("status").textContent = "";
  $("status").hidden = true;
  $("problem").hidden = false;
  $("problem").querySelector("p").textContent = message.charAt(0).toUpperCase() + message.slice(1);
  $("again").hidden = !repeatable;
  comeIntoView();
}

function showTiming(timing, trip) {
  const texts = { trip: `${trip.toFixed(0)} ms`, batch: timing.batch };
  for (const part of ["read", "wait", "model"]) texts[part] = `${timing[part].toFixed(timing[part] < 10 ? 1 : 0)} ms`;
  for (const cell of $("timing").querySelectorAll("dd")) cell.textContent = texts[cell.dataset.time];
  $("timing").hidden = false;
}

function bars(answers, choose) {
  const list = element("ol", { className: "bars" });
  for (const { name, probability } of answers) {
    const fill = element("span", { className: "fill" });
    fill.style.width = `${100 * probability}%`;
    const inside = [
      element("span", { className: "name" }, name),
      element("span", { className: "share" }, percent(probability)),
      element("span", { className: "track", ariaHidden: "true" }, fill),
    ];
    const row = choose
      ? element("button", { type: "button", ariaPressed: "false", onclick: () => choose(name), title: `What does ${name} rest on?` }, ...inside)
      : element("div", {}, ...inside);
    row.dataset.name = name;
    list.append(element("li", {}, row));
  }
  return list;
}

// --- pictures ---------------------------------------------------------------------------------------------------------

let picture = null; // the file that is shown
let importanceOf = null; // the class whose patches are shown

function startPictures(samples) {
  $("picture").hidden = false;
  const [height, width] = model.size;
  $("stage").style.aspectRatio = `${width} / ${height}`;
  for (const { name, url } of samples.pictures) {
    const button = element("button", { type: "button", ariaPressed: "false", title: name }, element("img", { src: url, alt: `Sample: ${name}`, onload: ({ target }) => target.classList.toggle("pixels", target.naturalWidth < SMALL) }));
    button.onclick = async () => {
      const data = await fetch(url).then((answer) => answer.blob()).catch(() => null);
      if (data) take(data, button);
      else fail("The server does not answer. Is it still running?");
    };
    $("samples").append(element("li", {}, button));
  }
  $("file").onchange = () => { take($("file").files[0]); $("file").value = ""; };
  const stage = $("stage");
  stage.ondragover = (event) => { event.preventDefault(); stage.classList.add("over"); };
  stage.ondragleave = () => stage.classList.remove("over");
  // Dropped beside the stage, a picture must not replace the page.
  document.ondragover = (event) => event.preventDefault();
  document.ondrop = (event) => {
    event.preventDefault();
    stage.classList.remove("over");
    take(event.dataTransfer.files[0]);
  };
  document.onpaste = (event) => {
    const file = [...event.clipboardData.files].find((one) => one.type.startsWith("image/"));
    if (file) take(file);
  };
  $("show-importance").onchange = () => { if (picture) showImportance(importanceOf); };
}

async function take(file, sample = null) {
  if (!file) return;
  for (const button of $("samples").querySelectorAll("button")) button.ariaPressed = String(button === sample);
  picture = null;
  clearImportance();
  await preview(file);
  if (file.size > model.body_limit) {
    turn++;
    fail(`The file has ${(file.size / 2 ** 20).toFixed(1)} MB; the server takes ${model.body_limit / 2 ** 20} MB at most.`);
    return;
  }
  picture = file;
  const send = (say) => ask("predict?top=5", { method: "POST", body: file, headers: { "content-type": "application/octet-stream" } }, say);
  await question(send, ({ answers }) => {
    $("result").append(bars(answers, showImportance));
    showImportance(answers[0].name);
    $("preview").setAttribute("aria-label", `The picture; the model says ${answers[0].name}`);
    return `${answers[0].name}, ${percent(answers[0].probability)}`;
  });
}

/** The part of the picture that the model sees: a centred box of its shape. */
async function preview(file) {
  const canvas = $("preview");
  const stage = $("stage");
  canvas.setAttribute("aria-label", "The picture");
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    stage.classList.add("empty"); // no picture, or one that the server can read and the browser cannot show
    return;
  }
  const [height, width] = model.size;
  const scale = Math.min(bitmap.width / width, bitmap.height / height) * model.crop;
  const [wide, high] = [width * scale, height * scale];
  const enlarge = Math.min(840 / wide, 840 / high, 1);
  canvas.width = Math.max(Math.round(wide * enlarge), 1);
  canvas.height = Math.max(Math.round(high * enlarge), 1);
  stage.classList.toggle("pixels", wide < SMALL);
  canvas.getContext("2d").drawImage(bitmap, (bitmap.width - wide) / 2, (bitmap.height - high) / 2, wide, high, 0, 0, canvas.width, canvas.height);
  stage.classList.remove("empty");
}

function clearImportance() {
  importanceOf = null;
  $("overlay").style.opacity = 0;
  $("importance-text").textContent = "";
}

/** Darken the patches that a class can do without. */
async function showImportance(name) {
  importanceOf = name;
  for (const row of $("result").querySelectorAll("[data-name]")) row.ariaPressed = String(row.dataset.name === name && $("show-importance").checked);
  if (!name || !$("show-importance").checked) {
    $("overlay").style.opacity = 0;
    $("importance-text").textContent = "";
    return;
  }
  const asked = picture;
  try {
    const path = `importance?name=${encodeURIComponent(name)}`;
    const { rows } = await ask(path, { method: "POST", body: asked, headers: { "content-type": "application/octet-stream" } });
    if (asked !== picture || name !== importanceOf || !$("show-importance").checked) return;
    const most = Math.max(...rows.flat());
    drawImportance(rows, most);
    $("importance-text").textContent = most > 0 ? `Hiding a bright square costs ${name} most.` : `No square speaks for ${name}.`;
  } catch (reason) {
    if (asked === picture) $("importance-text").textContent = reason.message;
  }
}

function drawImportance(rows, most) {
  const canvas = $("overlay");
  const context = canvas.getContext("2d");
  [canvas.height, canvas.width] = [rows.length, rows[0].length];
  const image = context.createImageData(canvas.width, canvas.height);
  const light = (value) => (most > 0 ? Math.sqrt(Math.max(value / most, 0)) : 0);
  rows.flat().forEach((value, place) => image.data.set([8, 10, 30, 215 * (1 - light(value))], 4 * place));
  context.putImageData(image, 0, 0);
  canvas.style.opacity = 1;
}

// --- text -------------------------------------------------------------------------------------------------------------

const WORDS = {
  fill: { title: "Sentence with [MASK]", button: "Fill in" },
  classify: { title: "Sentence", context: "Second sentence, if there is one", button: "Classify" },
  answer: { title: "Question", context: "Text that has the answer", button: "Find the answer" },
  translate: { title: "Sentence", button: "Translate" },
  generate: { title: "How the text begins", button: "Write on" },
};

function startText(samples, ability) {
  const words = WORDS[ability];
  $("text").hidden = false;
  $("sentence-label").textContent = words.title;
  $("ask").textContent = words.button;
  $("sentence").required = ability !== "generate";
  if (words.context) {
    $("context-field").hidden = false;
    $("context-label").textContent = words.context;
    $("context").required = ability === "answer";
  }
  $("insert-mask").hidden = ability !== "fill";
  $("insert-mask").onclick = () => {
    const field = $("sentence");
    field.setRangeText("[MASK]", field.selectionStart, field.selectionEnd, "end");
    field.focus();
  };
  for (const { text, context } of samples.texts) {
    const button = element("button", { type: "button" }, text);
    button.onclick = () => {
      $("sentence").value = text;
      $("context").value = context || "";
      askText(ability);
    };
    $("sentences").append(element("li", {}, button));
  }
  $("text-form").onsubmit = (event) => { event.preventDefault(); askText(ability); };
  $("sentence").onkeydown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("text-form").requestSubmit();
  };
}

function askText(ability) {
  const text = $("sentence").value;
  const context = $("context").value;
  const body = { text };
  if (WORDS[ability].context) body.context = context;
  const send = (say) => ask(ability, { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" } }, say);
  return question(send, (answer) => SHOW[ability](answer, text, context));
}

const SHOW = {
  fill({ masks }, text) {
    const parts = text.split("[MASK]");
    const line = element("p", { className: "filled" }, parts[0]);
    masks.forEach((answers, place) => line.append(element("mark", {}, answers[0].name), parts[place + 1] ?? ""));
    $("result").append(line);
    masks.forEach((answers, place) => {
      if (masks.length > 1) $("result").append(element("h3", {}, `[MASK] number ${place + 1}`));
      $("result").append(bars(answers));
    });
    return masks.length > 1 ? `${masks.length} words filled in` : `${masks[0][0].name}, ${percent(masks[0][0].probability)}`;
  },
  classify({ answers }) {
    $("result").append(bars(answers));
    return `${answers[0].name}, ${percent(answers[0].probability)}`;
  },
  answer({ answers }, text, context) {
    if (!answers.length) return "No answer was found.";
    const [{ start, end }] = answers;
    // The server counts characters, JavaScript counts halves of some of them.
    const letters = [...context];
    const cut = (from, to) => letters.slice(from, to).join("");
    $("result").append(element("p", { className: "filled" }, cut(0, start), element("mark", {}, cut(start, end)), cut(end)), bars(answers));
    return `${answers[0].name}, ${percent(answers[0].probability)}`;
  },
  translate({ text }) {
    $("result").append(element("p", { className: "written" }, text));
    return "Translated";
  },
  generate({ text }) {
    $("result").append(element("p", { className: "written" }, text));
    return "Written";
  },
};

// --- token-mixing maps ------------------------------------------------------------------------------------------------

let maps = null;
let chosen = null; // the first time the one in the middle

function startMaps() {
  if (!model.layers.length) return;
  $("mixing").hidden = false;
  $("layer").max = model.layers.length - 1;
  $("layer").oninput = loadMaps;
  const mosaic = $("mosaic");
  const point = (event) => {
    if (!maps) return;
    const box = mosaic.getBoundingClientRect();
    const column = Math.min(Math.max(Math.floor((event.clientX - box.left) / box.width * maps.columns), 0), maps.columns - 1);
    const row = Math.min(Math.max(Math.floor((event.clientY - box.top) / box.height * maps.rows), 0), maps.rows - 1);
    choose(row * maps.columns + column);
  };
  mosaic.onpointermove = point;
  mosaic.onpointerdown = point;
  mosaic.onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -maps?.columns, ArrowDown: maps?.columns }[event.key];
    if (!maps || !step) return;
    event.preventDefault();
    choose(chosen + step);
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMaps);
  loadMaps();
}

async function loadMaps() {
  const number = Number($("layer").value);
  const { name } = model.layers[number];
  $("layer-name").textContent = `${number + 1} of ${model.layers.length}`;
  $("layer").setAttribute("aria-valuetext", `${number + 1} of ${model.layers.length}: ${name}`);
  try {
    const found = await ask(`maps?layer=${encodeURIComponent(name)}`);
    if (Number($("layer").value) !== number) return;
    const values = Int8Array.from(atob(found.data), (letter) => letter.charCodeAt(0));
    // The rows of a matrix over patches lie as the patches do.
    const columns = found.kind === "matrix" && found.count === found.height * found.width ? found.width : Math.ceil(Math.sqrt(found.count));
    maps = { ...found, values, columns, rows: Math.ceil(found.count / columns) };
    const middle = Math.floor(maps.rows / 2) * columns + Math.floor(columns / 2);
    chosen = Math.min(chosen ?? middle, maps.count - 1);
    drawMaps();
  } catch (reason) {
    maps = null;
    $("mixing-text").textContent = reason.message;
  }
}

function choose(place) {
  if (place < 0 || place >= maps.count || place === chosen) return;
  chosen = place;
  drawMaps();
}

const KINDS = {
  matrix: "Every tile belongs to one patch and shows how much of every other patch it reads in this layer.",
  units: "Every tile is a hidden unit of the token-mixing MLP and shows which patches it reads; slow patterns come first.",
  "class row": "How much of every patch the class token reads.",
  kernels: "The kernels of the convolution over patches.",
};

function drawMaps() {
  if (!maps) return;
  const { count, height, width, columns, rows, kind, largest } = maps;
  const single = count === 1;
  const text = single && kind === "matrix";
  $("mixing-text").textContent = text ? "Row by row: how much of every token each token reads in this layer." : KINDS[kind];
  document.querySelector(".maps").classList.toggle("single", single);
  const gap = single ? 0 : 1;
  const canvas = $("mosaic");
  canvas.tabIndex = single ? -1 : 0;
  canvas.width = columns * (width + gap) + gap;
  canvas.height = rows * (height + gap) + gap;
  canvas.setAttribute("aria-label", `Weights of ${maps.layer}: ${count} ${count === 1 ? "map" : "maps, arrow keys choose one"}`);
  const context = canvas.getContext("2d");
  const colours = palette();
  const left = (place) => (place % columns) * (width + gap) + gap;
  const top = (place) => Math.floor(place / columns) * (height + gap) + gap;
  if (!single) {
    context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
    context.fillRect(left(chosen) - 1, top(chosen) - 1, width + 2, height + 2);
  }
  for (let place = 0; place < count; place++) context.putImageData(paint(context, place, colours), left(place), top(place));
  if (single) return;
  const detail = $("detail");
  [detail.width, detail.height] = [width, height];
  detail.getContext("2d").putImageData(paint(detail.getContext("2d"), chosen, colours), 0, 0);
  const patches = kind === "matrix" && count === height * width;
  const who = patches ? `The patch in row ${Math.floor(chosen / width) + 1}, column ${(chosen % width) + 1}` : `Number ${chosen + 1} of ${count}`;
  const part = maps.values.subarray(chosen * height * width, (chosen + 1) * height * width);
  const strongest = part.reduce((best, value, place) => (Math.abs(value) > Math.abs(part[best]) ? place : best), 0);
  const weight = (part[strongest] * largest / 127).toPrecision(2);
  $("detail-text").textContent = kind === "kernels" ? `${who}; its largest weight is ${weight}.`
    : `${who} reads most from row ${Math.floor(strongest / width) + 1}, column ${(strongest % width) + 1} (weight ${weight}).`;
  detail.setAttribute("aria-label", $("detail-text").textContent);
}

/** The colours of the page, so that maps follow light and dark. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim().match(/[\da-f]{2}/gi).map((part) => parseInt(part, 16));
  const [zero, plus, minus] = ["--zero", "--plus", "--minus"].map(read);
  return Array.from({ length: 256 }, (_, place) => {
    const value = (place < 128 ? place : place - 256) / 127;
    const share = Math.min(Math.abs(value) ** 0.7, 1); // small weights stay visible
    const end = value < 0 ? minus : plus;
    return zero.map((from, channel) => Math.round(from + (end[channel] - from) * share));
  });
}

function paint(context, place, colours) {
  const { height, width, values } = maps;
  const image = context.createImageData(width, height);
  const start = place * height * width;
  for (let cell = 0; cell < height * width; cell++) image.data.set([...colours[values[start + cell] & 255], 255], 4 * cell);
  return image;
}

// --- start ------------------------------------------------------------------------------------------------------------

async function watch() {
  const pill = $("health");
  const told = await fetch("health").then((answer) => answer.json()).catch(() => ({ status: "gone" }));
  const words = { ok: "ready", draining: "shutting down", gone: "not answering" };
  const word = words[told.status] || "not answering";
  if (pill.textContent !== word) pill.textContent = word; // or it would be read aloud every time
  pill.className = `pill ${told.status === "ok" ? "ok" : "bad"}`;
}

async function start() {
  $("again").onclick = () => lastAsk && lastAsk();
  try {
    model = await ask("model");
    const samples = await ask("samples");
    const { ability } = model;
    $("title").textContent = model.name;
    document.title = `${model.name} · allmlp`;
    const facts = [`${(model.parameters / 1e6).toFixed(2)} M parameters`, model.reads.replace("x", "×")];
    if (model.classes.length) facts.push(`${model.classes.length} classes`);
    $("facts").textContent = facts.join(" · ");
    $("version").textContent = `allmlp ${model.version}`;
    if (ability === "predict") startPictures(samples);
    else startText(samples, ability);
    startMaps();
  } catch (reason) {
    $("facts").textContent = "";
    fail(reason.message);
  }
  watch();
  setInterval(watch, 10_000);
}

start();
