// Places what the console server draws: one EventSource a tab, shared by all islands on the page.
const STALE_S = 3;
const LOOK_MS = 500;
const REOPEN_MS = 1500;

function makeHub() {
  const hub = { parts: {}, frame: null, heardAt: 0, listeners: new Set(), url: null, source: null };
  const tell = () => hub.listeners.forEach((listen) => listen());

  const take = (event) => {
    const frame = JSON.parse(event.data);
    Object.assign(hub.parts, frame.parts);
    hub.frame = frame;
    hub.heardAt = performance.now();
    tell();
  };

  const open = () => {
    if (hub.source || !hub.url || document.hidden) return;
    hub.source = new EventSource(hub.url);
    hub.source.onmessage = take;
  };
  const close = () => {
    hub.source?.close();
    hub.source = null;
  };

  hub.follow = (url) => {
    if (hub.url === url) return;
    close();
    hub.url = url;
    open();
  };
  hub.age = () => (hub.frame && hub.frame.age !== null ? hub.frame.age + (performance.now() - hub.heardAt) / 1000 : null);
  hub.stale = () => hub.age() === null || hub.age() > STALE_S;

  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  setInterval(tell, LOOK_MS);
  setInterval(() => {
    if (hub.source?.readyState === EventSource.CLOSED) close();
    open();
  }, REOPEN_MS);
  return hub;
}

function markTheme() {
  const shown = getComputedStyle(document.querySelector(".stApp") ?? document.body).backgroundColor;
  const [red, green, blue] = (shown.match(/[\d.]+/g) ?? [255, 255, 255]).map(Number);
  document.documentElement.dataset.ppTheme = red + green + blue < 384 ? "dark" : "light";
}

function place(root, hub) {
  root.querySelectorAll("[data-part]").forEach((element) => {
    const markup = hub.parts[element.dataset.part];
    if (markup === undefined || element.placed === markup) return;
    const opened = element.querySelector("details")?.open;
    element.innerHTML = markup;
    if (opened) element.querySelector("details").open = true;
    element.placed = markup;
  });
}

function watchAge(root, hub, data, setStateValue, memory) {
  const strip = root.querySelector(".pp-strip");
  const stale = hub.stale();
  const code = stale ? (hub.frame ? "stale" : "connecting") : hub.frame.code;
  strip.dataset.code = code;
  const note = root.querySelector(".pp-stale");
  note.hidden = !(stale && hub.frame);
  const age = hub.age();
  if (!note.hidden) note.textContent = data.stale.replace("{age}", age === null ? data.never : `${age.toFixed(0)} s`);
  if (memory.code !== code) {
    const said = code === "stale" ? note.textContent : hub.frame?.announce;
    if (memory.code !== undefined && said) root.querySelector("[data-announce]").textContent = said;
    memory.code = code;
  }
  if (hub.frame && memory.stale !== stale) {
    if (memory.stale !== undefined || stale !== data.was_stale) setStateValue("stale", stale);
    memory.stale = stale;
  }
  if (hub.frame?.fleet && memory.fleet !== hub.frame.fleet) {
    if (memory.fleet !== undefined) setStateValue("fleet", hub.frame.fleet);
    memory.fleet = hub.frame.fleet;
  }
}

export default function ({ data, parentElement, setStateValue }) {
  const given = JSON.parse(new TextDecoder().decode(data));
  const hub = (window.phaseplaneHub ??= makeHub());
  const memory = (parentElement.phaseplane ??= {});
  const listen = () => {
    place(parentElement, hub);
    markTheme();
    if (parentElement.querySelector(".pp-strip")) watchAge(parentElement, hub, given, setStateValue, memory);
  };
  hub.listeners.delete(memory.listen);
  memory.listen = listen;
  hub.listeners.add(listen);
  hub.follow(given.url);
  listen();
  return () => hub.listeners.delete(listen);
}
