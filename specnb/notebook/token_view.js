// The interactive token view: plain ESM for anywidget. All text goes through textContent, and nothing is fetched.

const SCHEMES = [
  ["outcome", "outcome"],
  ["source", "source"],
  ["probability", "target probability"],
  ["saved", "saved time"],
];
const OUTCOMES = {
  accepted: "accepted: drafted, and what the target wanted",
  lookup: "lookup: drafted from the text or the memory, and accepted",
  corrected: "corrected: the target's own, after a rejected draft",
  bonus: "bonus: the target's own, after a fully accepted draft",
  plain: "plain: no draft in this step",
  chosen: "chosen: what you branched with",
};
const PACES = [["own pace", 1], ["half as fast", 2], ["5 times slower", 5], ["20 times slower", 20], ["100 times slower", 100]];
const NO_ANSWER = "The kernel has not answered: it is busy, or not running.";
let count = 0;

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// fonts lack a sign for it
function fork() {
  const icon = svg("svg", { viewBox: "0 0 12 12", width: 12, height: 12, fill: "none", stroke: "currentColor", "stroke-width": 1.3 });
  icon.append(svg("path", { d: "M2 1v10M2 8c0-3 7-1 7-5" }), svg("circle", { cx: 9, cy: 2.2, r: 1.4 }));
  return icon;
}

const percent = (p) => (p >= 0.9995 ? "100%" : p >= 0.1 ? `${(100 * p).toFixed(0)}%` : p >= 0.001 ? `${(100 * p).toFixed(1)}%` : "<0.1%");
const time = (s) => (Math.abs(s) < 1 ? `${(1000 * s).toFixed(Math.abs(s) < 0.01 ? 1 : 0)} ms` : `${s.toFixed(2)} s`);
const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;
const quoted = (text) => `“${text.replaceAll("\n", "⏎").replaceAll("\t", "⇥")}”`;
const named = (source) => ({ target: "the target", chosen: "you" })[source] ?? source.replaceAll("_", " ");

// Front ends name their themes in many ways, so the page itself is asked: is the background dark?
function isDark(element) {
  for (let at = element; at; at = at.parentElement ?? at.getRootNode()?.host) {
    const found = getComputedStyle(at).backgroundColor.match(/[\d.]+/g)?.map(Number);
    if (found && (found.length < 4 || found[3] > 0.5)) return 0.299 * found[0] + 0.587 * found[1] + 0.114 * found[2] < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

class TokenView {
  constructor(model, host) {
    this.model = model;
    this.name = `specnb-tokens-${++count}`;
    this.row = 0;
    this.open = null; // the token whose step is shown
    this.place = null; // the position within that step
    this.step = 0; // steps that the replay has reached
    this.clock = 0; // seconds
    this.playing = null;
    this.slower = 1;
    this.root = h("div", { class: "specnb-tokens specnb-live", role: "region", "aria-label": "Tokens of a run" });
    host.append(this.root);
    this.listeners = [
      ["change:runs", () => this.draw()],
      ["change:current", () => this.draw()],
      ["change:state", () => this.showState()],
      ["change:asked", () => this.showStep()],
      ["change:colour", () => this.paint()],
      ["change:show_rejected", () => this.paint()],
    ];
    for (const [event, handler] of this.listeners) model.on(event, handler);
    this.theme = () => (this.root.dataset.theme = isDark(host) ? "dark" : "light");
    this.watch = new MutationObserver(this.theme);
    for (const element of [document.documentElement, document.body]) {
      this.watch.observe(element, { attributes: true, attributeFilter: ["class", "style", "data-jp-theme-light", "data-jp-theme-name", "data-theme", "theme"] });
    }
    // a theme's style sheet arrives after its name, and the element is put into the page after it is made
    this.settle = setInterval(this.theme, 1000);
    requestAnimationFrame(this.theme);
    this.draw();
  }

  close() {
    this.pause();
    this.watch.disconnect();
    clearInterval(this.settle);
    clearTimeout(this.waiting);
    for (const [event, handler] of this.listeners) this.model.off(event, handler);
  }

  // ---- what is shown
  get run() {
    const runs = this.model.get("runs");
    return runs.find((one) => one.id === this.model.get("current")) ?? runs[0];
  }

  get data() {
    const rows = this.run.model.rows;
    return rows[Math.min(this.row, rows.length - 1)];
  }

  get end() {
    return this.data.steps.length;
  }

  get seconds() {
    return this.data.steps.at(-1)?.end ?? 0;
  }

  // ---- to the kernel
  set(name, value) {
    this.model.set(name, value);
    try {
      this.model.save_changes();
    } catch {
      // without a kernel the view goes on by itself
    }
  }

  ask(content) {
    this.say("asking the kernel …");
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.say(NO_ANSWER), 8000);
    try {
      this.model.send(content);
    } catch {
      this.say(NO_ANSWER);
    }
  }

  say(text, kind = "") {
    this.status.textContent = text;
    this.status.dataset.kind = kind;
  }

  showState() {
    if (!this.run) return;
    clearTimeout(this.waiting);
    const state = this.model.get("state");
    this.say(state.text ?? "", state.kind ?? "");
    this.stop.hidden = state.kind !== "running";
  }

  // ---- drawing
  draw() {
    this.pause();
    if (!this.run) {
      this.root.replaceChildren(h("p", { class: "sn-hint" }, "The text appears here after a run."));
      return;
    }
    const focus = this.root.contains(document.activeElement);
    this.open = this.place = null;
    this.step = this.end;
    this.clock = Math.max(this.seconds, this.data.plain?.times.at(-1) ?? 0);
    this.focused = this.data.kept ? this.data.kept - 1 : 0;
    this.tip = h("div", { class: "sn-tip", role: "tooltip", id: `${this.name}-tip`, hidden: true });
    this.status = h("span", { class: "sn-status", role: "status", "aria-live": "polite", "aria-label": "status" });
    this.stop = h("button", { type: "button", class: "sn-button", hidden: true, onclick: () => this.model.send({ type: "stop" }) }, "Stop");
    this.aside = h("section", { class: "sn-step", "aria-label": "The opened step" });
    this.legend = h("div", { class: "sn-legend", role: "note", "aria-label": "Legend" });
    this.root.replaceChildren(
      this.drawHead(),
      this.drawControls(),
      this.legend,
      h("div", { class: "sn-main" }, this.drawText(), this.aside),
      this.drawReplay(),
      this.drawTree(),
      h("div", { class: "sn-foot" }, this.status, this.stop),
      this.tip,
    );
    this.paint();
    this.showStep();
    this.showClock();
    this.showState();
    if (focus) this.spans[this.focused]?.focus({ preventScroll: true });
  }

  drawHead() {
    const { model, assistant, method, stats, settings } = this.run.model;
    const names = [model, assistant && `with ${assistant}`].filter(Boolean).join(" ");
    const given = settings.map(([name, value]) => h("span", {}, h("b", {}, name), ` ${value}`));
    const prompt = this.data.prompt;
    return h(
      "header",
      { class: "sn-head" },
      h("div", { class: "sn-title" }, h("strong", {}, names || "run"), h("span", {}, stats.startsWith(method) ? stats : `${method} · ${stats}`)),
      h(
        "details",
        {},
        h("summary", {}, "prompt and settings"),
        h("div", { class: "sn-settings" }, given),
        prompt === null ? null : h("div", { class: "sn-prompt", dir: "auto" }, prompt),
      ),
    );
  }

  drawControls() {
    const scheme = this.model.get("colour");
    const choices = SCHEMES.map(([value, label]) =>
      h(
        "label",
        { class: "sn-choice" },
        h("input", { type: "radio", name: `${this.name}-colour`, value, checked: value === scheme, onchange: () => this.set("colour", value) }),
        h("span", {}, label),
      ),
    );
    const rows = this.run.model.rows;
    const select = h(
      "select",
      { "aria-label": "Row", onchange: (event) => ((this.row = Number(event.target.value)), this.draw()) },
      rows.map((_, i) => h("option", { value: i, selected: i === this.row }, `row ${i + 1} of ${rows.length}`)),
    );
    const rejected = this.data.steps.some((step) => step.drafted > step.accepted);
    this.showRejected = h("input", { type: "checkbox", checked: this.model.get("show_rejected"), onchange: (event) => this.set("show_rejected", event.target.checked) });
    return h(
      "div",
      { class: "sn-controls" },
      h("div", { class: "sn-choices", role: "radiogroup", "aria-label": "Colour by" }, h("span", { class: "sn-label" }, "Colour by"), choices),
      rejected ? h("label", { class: "sn-check" }, this.showRejected, "rejected drafts") : null,
      rows.length > 1 ? select : null,
    );
  }

  drawText() {
    const { tokens, steps } = this.data;
    this.spans = [];
    this.rejected = [];
    const text = h("div", {
      class: "sn-text",
      role: "listbox",
      dir: "auto",
      "aria-label": "Generated tokens. Arrow keys go from token to token, Enter opens the step.",
      onkeydown: (event) => this.key(event),
      onclick: (event) => this.pick(event),
      onpointerover: (event) => this.point(event.target.closest?.(".sn-token")),
      onpointerleave: () => this.point(null),
      onfocusin: (event) => this.point(event.target.closest?.(".sn-token")),
      onfocusout: () => this.point(null),
    });
    tokens.forEach((token, i) => {
      const step = token.step === null ? null : steps[token.step];
      if (step && token.place === null) text.append(...this.drawRejected(step, token.step));
      const span = h("span", {
        class: "sn-token",
        role: "option",
        tabindex: i === this.focused ? 0 : -1,
        "aria-selected": "false",
        "aria-label": this.words(token, i),
        "data-i": i,
        "data-origin": token.origin,
        "data-kept": i < this.data.kept || null,
      });
      if (token.text.includes("\n")) {
        token.text.split(/(\n)/).forEach((part) => span.append(part === "\n" ? h("i", { class: "sn-break", "aria-hidden": "true" }, "⏎") : "", part));
      } else span.append(token.text);
      this.spans.push(span);
      text.append(span);
    });
    if (!tokens.length) text.append(h("span", { class: "sn-none" }, "no tokens"));
    steps.forEach((step, number) => {
      // a step that ended the text has no token of the target's own to stand before
      if (step.drafted > step.accepted && step.count === step.accepted) {
        this.spans[step.first + step.count - 1]?.after(...this.drawRejected(step, number));
      }
    });
    this.text = text;
    return text;
  }

  drawRejected(step, number) {
    const made = step.positions.slice(step.accepted, step.drafted).map((position, i) =>
      h("del", { class: "sn-rejected", "aria-hidden": "true", "data-step": number, "data-place": step.accepted + i }, position.text),
    );
    this.rejected.push(...made);
    return made;
  }

  words(token, i) {
    const step = token.step === null ? null : this.data.steps[token.step];
    return [
      quoted(token.text),
      token.origin,
      step && `step ${token.step + 1} of ${this.end}`,
      `written by ${named(token.source)}`,
      token.probability !== null && `target ${percent(token.probability)}`,
      token.draft_probability !== null && `draft ${percent(token.draft_probability)}`,
      token.rank !== null && `rank ${token.rank}`,
    ]
      .filter(Boolean)
      .join(", ");
  }

  // ---- colour
  paint() {
    if (!this.run) return;
    const scheme = this.model.get("colour");
    const { tokens } = this.data;
    this.root.dataset.colour = scheme;
    for (const input of this.root.querySelectorAll(".sn-choices input")) input.checked = input.value === scheme;
    this.showRejected.checked = this.model.get("show_rejected");
    this.root.classList.toggle("sn-with-rejected", this.model.get("show_rejected"));
    const sources = [...new Set(tokens.map((token) => token.source))].sort((a, b) => (b === "target") - (a === "target"));
    const saved = tokens.map((token) => Math.abs(token.saved ?? 0)).sort((a, b) => a - b);
    const most = saved[Math.floor(0.95 * (saved.length - 1))] || 1e-9;
    tokens.forEach((token, i) => {
      const style = this.spans[i].style;
      delete this.spans[i].dataset.tint;
      style.removeProperty("--sn-alpha");
      if (scheme === "source") this.spans[i].dataset.tint = `source-${sources.indexOf(token.source) % 5}`;
      if (scheme === "probability" && token.probability !== null) {
        this.spans[i].dataset.tint = "unlikely";
        style.setProperty("--sn-alpha", (0.75 * (1 - token.probability)).toFixed(3));
      }
      if (scheme === "saved" && token.saved !== null) {
        this.spans[i].dataset.tint = token.saved >= 0 ? "won" : "lost";
        style.setProperty("--sn-alpha", (0.6 * Math.min(1, Math.abs(token.saved) / most)).toFixed(3));
      }
    });
    const chip = (attributes, label, title) => h("span", { class: "sn-chip", title }, h("span", { class: "sn-token", ...attributes }, "ab"), label);
    const scale = (kind, low, high) => h("span", { class: "sn-chip" }, low, h("span", { class: `sn-scale sn-${kind}`, "aria-hidden": "true" }), high);
    const parts = {
      outcome: () => Object.keys(OUTCOMES).filter((origin) => tokens.some((token) => token.origin === origin)).map((origin) => chip({ "data-origin": origin }, origin, OUTCOMES[origin])),
      source: () => sources.map((source, i) => chip({ "data-tint": `source-${i % 5}` }, named(source), `written by ${named(source)}`)),
      probability: () =>
        tokens.some((token) => token.probability !== null) ? [scale("unlikely", "the target was sure: 100%", "0%")] : ["probabilities were not recorded (logprobs=True)"],
      saved: () =>
        tokens.some((token) => token.saved !== null)
          ? [scale("diverging", `${time(most)} later`, `${time(most)} earlier than plain decoding, per token`), this.basis()]
          : ["nothing to compare with: this is plain decoding, or too short"],
    }[scheme]();
    if (this.model.get("show_rejected") && this.rejected.length) parts.push(h("span", { class: "sn-chip" }, h("del", { class: "sn-rejected" }, "ab"), "rejected"));
    this.legend.replaceChildren(...parts);
  }

  basis() {
    const { plain } = this.data;
    return h("span", { class: "sn-muted" }, plain.measured ? "plain decoding: measured" : `plain decoding: ${plain.basis}`);
  }

  // ---- pointing and opening
  point(span) {
    const i = span ? Number(span.dataset.i) : null;
    if (i === null || Number.isNaN(i)) {
      this.tip.hidden = true;
      return;
    }
    const token = this.data.tokens[i];
    const step = token.step === null ? null : this.data.steps[token.step];
    const rejected = step && token.place === null && step.drafted > step.accepted ? step.positions[step.accepted] : null;
    const numbers = [
      token.probability !== null && ["target", percent(token.probability)],
      token.draft_probability !== null && ["draft", percent(token.draft_probability)],
      token.rank !== null && ["rank", `${token.rank}`],
      token.saved !== null && [token.saved >= 0 ? "earlier by" : "later by", time(Math.abs(token.saved))],
    ].filter(Boolean);
    this.tip.replaceChildren(
      h("div", {}, h("b", {}, quoted(token.text)), h("span", { class: "sn-word" }, token.origin)),
      h("div", { class: "sn-muted" }, [step && `step ${token.step + 1} of ${this.end}`, `written by ${named(token.source)}`].filter(Boolean).join(" · ")),
      rejected ? h("div", { class: "sn-muted" }, "instead of ", h("del", {}, rejected.text), rejected.draft_probability === null ? "" : `, draft ${percent(rejected.draft_probability)}`) : "",
      h("div", { class: "sn-facts" }, numbers.map(([name, value]) => h("span", {}, `${name} `, h("b", {}, value)))),
    );
    this.tip.hidden = false;
    const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const root = this.root.getBoundingClientRect();
    const left = Math.max(4, Math.min(box.left - root.left, root.width - this.tip.offsetWidth - 4));
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${box.bottom - root.top + 6}px`;
    span.setAttribute("aria-describedby", this.tip.id);
  }

  pick(event) {
    const rejected = event.target.closest(".sn-rejected");
    if (rejected) {
      const step = this.data.steps[rejected.dataset.step];
      this.openToken(Math.min(step.first + step.accepted, this.spans.length - 1), Number(rejected.dataset.place));
      return;
    }
    const span = event.target.closest(".sn-token");
    if (span) this.openToken(Number(span.dataset.i));
    this.tip.hidden = true;
  }

  key(event) {
    const i = this.spans.indexOf(event.target);
    if (i < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    const { tokens, steps } = this.data;
    const at = tokens[i].step;
    const first = (number) => (steps[number] ? steps[number].first : null);
    const to = {
      ArrowRight: i + 1,
      ArrowLeft: i - 1,
      ArrowDown: first(at === null ? 0 : at + 1) ?? i,
      ArrowUp: at === null ? i - 1 : (i > steps[at].first ? steps[at].first : first(at - 1)) ?? i,
      Home: 0,
      End: tokens.length - 1,
    }[event.key];
    if (to !== undefined) this.focus(Math.max(0, Math.min(tokens.length - 1, to)));
    else if (event.key === "Enter" || event.key === " ") this.openToken(i, null, true);
    else if (event.key === "Escape") this.closeStep();
    else return;
    event.preventDefault();
    event.stopPropagation(); // the notebook has keys of its own
  }

  focus(i) {
    this.spans[this.focused]?.setAttribute("tabindex", "-1");
    this.focused = i;
    this.spans[i].setAttribute("tabindex", "0");
    this.spans[i].focus();
  }

  openToken(i, place = null, focus = false) {
    if (this.open !== null) this.spans[this.open].setAttribute("aria-selected", "false");
    this.spans[this.focused]?.setAttribute("tabindex", "-1");
    this.open = this.focused = i;
    this.spans[i].setAttribute("tabindex", "0");
    this.spans[i].setAttribute("aria-selected", "true");
    const token = this.data.tokens[i];
    const step = token.step === null ? null : this.data.steps[token.step];
    this.place = place ?? token.place ?? (step ? step.positions.length - 1 : null);
    this.showStep();
    if (focus) this.aside.querySelector(".sn-positions [tabindex='0']")?.focus();
  }

  closeStep() {
    if (this.open === null) return;
    const back = this.open;
    this.spans[back].setAttribute("aria-selected", "false");
    this.open = this.place = null;
    this.showStep();
    this.focus(back);
  }

  showStep() {
    if (!this.run) return;
    for (const span of this.spans) span.classList.remove("sn-in-step");
    this.root.classList.toggle("sn-opened", this.open !== null);
    if (this.open === null) {
      this.aside.replaceChildren(h("p", { class: "sn-hint" }, "Point at a token to see where it comes from. Click it, or press Enter, to open its step: what both models would have said, and branches from there."));
      return;
    }
    const token = this.data.tokens[this.open];
    const close = h("button", { type: "button", class: "sn-icon", "aria-label": "Close the step", onclick: () => this.closeStep() }, "×");
    if (token.step === null) {
      this.aside.replaceChildren(
        h("div", { class: "sn-step-head" }, h("strong", {}, quoted(token.text)), close),
        h("p", { class: "sn-hint" }, "You chose this token: the run branches here."),
      );
      return;
    }
    const number = token.step;
    const step = this.data.steps[number];
    const stop = step.kept ? this.data.kept - 1 : this.spans.length; // a branch may have kept a part of its first step
    for (let i = step.first; i < Math.min(step.first + step.count, stop); i++) this.spans[i].classList.add("sn-in-step");
    const go = (to, label, sign) =>
      h("button", { type: "button", class: "sn-icon", "aria-label": label, disabled: !this.data.steps[to], onclick: () => this.openToken(Math.min(this.data.steps[to].first, this.spans.length - 1)) }, sign);
    const drafted = step.drafted
      ? `${named(step.source)} drafted ${step.drafted}${step.match_length ? `, after a match of ${plural(step.match_length, "token")}` : ""}; ${step.accepted} accepted`
      : "nothing was drafted";
    this.aside.replaceChildren(
      h("div", { class: "sn-step-head" }, go(number - 1, "Previous step", "‹"), h("strong", {}, `Step ${number + 1} of ${this.end}`), go(number + 1, "Next step", "›"), close),
      h("p", { class: "sn-muted" }, drafted, h("br"), `${time(step.draft + step.verify + step.other)}: ${time(step.draft)} drafting, ${time(step.verify)} verifying`),
      this.drawPositions(step),
      this.drawPosition(step, step.positions[this.place]),
    );
  }

  drawPositions(step) {
    const list = h("div", { class: "sn-positions", role: "tablist", "aria-label": "Tokens of the step" });
    step.positions.forEach((position, place) => {
      const shown = place === this.place;
      const gone = ["rejected", "dropped"].includes(position.fate);
      const tab = h(
        "button",
        {
          type: "button",
          role: "tab",
          class: gone ? "sn-token sn-gone" : "sn-token",
          "aria-selected": String(shown),
          tabindex: shown ? 0 : -1,
          "aria-label": `${quoted(position.text)}, ${position.fate}`,
          "data-origin": gone ? null : position.fate,
          onclick: () => this.showPlace(place),
          onkeydown: (event) => {
            const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: step.positions.length - 1 }[event.key];
            if (event.key === "Escape") this.closeStep();
            else if (to !== undefined && step.positions[to]) this.showPlace(to, true);
            else return;
            event.preventDefault();
            event.stopPropagation();
          },
        },
        position.text.replaceAll("\n", "⏎"),
      );
      list.append(tab);
    });
    return list;
  }

  showPlace(place, focus = true) {
    this.place = place;
    this.showStep();
    if (focus) this.aside.querySelector(".sn-positions [tabindex='0']")?.focus();
  }

  drawPosition(step, position) {
    const emitted = Math.min(this.place, step.accepted); // the rejected token and the correction stand at one place
    const index = step.first + emitted;
    const dropped = position.fate === "dropped" || (step.kept && index >= this.data.kept);
    const asked = this.model.get("asked")[`${this.run.id}:${this.row}:${index}`];
    const target = position.target_top ?? (dropped ? null : asked ?? null);
    const own = step.positions.at(-1);
    const facts = [
      position.probability !== null && `target ${percent(position.probability)}`,
      position.draft_probability !== null && `draft ${percent(position.draft_probability)}`,
      position.rank !== null && `rank ${position.rank}`,
    ].filter(Boolean);
    const why = {
      accepted: "Accepted.",
      lookup: "Drafted by lookup, and accepted.",
      rejected: own !== position ? `Rejected; the target wrote ${quoted(own.text)}.` : "Rejected.",
      dropped: "Dropped: it came after a rejected token, or after the end.",
      corrected: "The target's own token, in place of the rejected one.",
      bonus: "The target's own token: the whole draft was accepted.",
      plain: "The target's own token: nothing was drafted.",
    }[position.fate];
    const lists = h("div", { class: "sn-lists" });
    if (target) lists.append(this.drawTop("target", target, position, index, !dropped));
    if (position.draft_top) lists.append(this.drawTop(named(step.source), position.draft_top, position, index, !dropped));
    const missing =
      target || dropped
        ? null
        : h(
            "p",
            { class: "sn-hint" },
            "What else the models would have said was not recorded (top_logprobs=5). ",
            this.model.get("can_run") ? h("button", { type: "button", class: "sn-button", onclick: () => this.ask({ type: "ask", run: this.run.id, row: this.row, index }) }, "Ask the target") : null,
          );
    return h("div", { class: "sn-position", role: "tabpanel", "aria-label": `${quoted(position.text)}, ${position.fate}` }, h("p", {}, h("b", {}, quoted(position.text)), " ", why), facts.length ? h("p", { class: "sn-muted" }, facts.join(" · ")) : null, missing, lists);
  }

  drawTop(name, pairs, position, index, branches) {
    const written = this.data.tokens[index]?.id;
    const items = pairs.map(([text, id, probability]) => {
      const bar = h("span", { class: "sn-bar", "aria-hidden": "true" }, h("span", { style: `width:${Math.max(1, 100 * probability).toFixed(1)}%` }));
      const inside = [h("span", { class: "sn-alternative" }, text.replaceAll("\n", "⏎")), bar, h("span", { class: "sn-number" }, percent(probability))];
      if (id === written || !branches || !this.model.get("can_run")) {
        const note = id === written ? ", in the text" : "";
        return h("li", { class: id === written ? "sn-written" : "", "aria-label": `${quoted(text)}, ${percent(probability)}${note}` }, h("span", { class: "sn-line" }, inside, h("span", { class: "sn-go", "aria-hidden": "true" }, id === written ? "✓" : "")));
      }
      const go = () => this.ask({ type: "branch", run: this.run.id, row: this.row, index, token: id });
      return h("li", {}, h("button", { type: "button", class: "sn-line", title: "branch here", "aria-label": `Branch here with ${quoted(text)}, ${percent(probability)}`, onclick: go }, inside, h("span", { class: "sn-go", "aria-hidden": "true" }, fork())));
    });
    return h("div", { class: "sn-top" }, h("h4", {}, name), h("ol", { "aria-label": `Best tokens of ${name}` }, items));
  }

  // ---- the replay
  drawReplay() {
    const { steps, plain } = this.data;
    this.play = h("button", { type: "button", class: "sn-icon sn-play", "aria-label": "Play", onclick: () => this.toggle() }, "▶");
    this.range = h("input", { type: "range", min: 0, max: this.end, step: 1, value: this.step, class: "sn-range", "aria-label": "Step of the replay", oninput: () => (this.pause(), this.toStep(Number(this.range.value))) });
    this.range.addEventListener("keydown", (event) => event.stopPropagation());
    this.where = h("output", { class: "sn-where" });
    const pace = h("select", { "aria-label": "Pace of the replay", onchange: (event) => (this.slower = Number(event.target.value)) }, PACES.map(([label, value]) => h("option", { value, selected: value === this.slower }, label)));
    const last = Math.max(this.seconds, plain?.times.at(-1) ?? 0) || 1;
    const mine = svg("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img" });
    const path = (spans) => spans.map(([from, to]) => `M${(1000 * from) / last} 0H${(1000 * Math.max(to, from)) / last}V10H${(1000 * from) / last}Z`).join("");
    const timed = steps.filter((step) => step.end > step.begin);
    mine.append(
      svg("path", { class: "sn-draft", d: path(timed.map((s) => [s.begin, s.begin + s.draft])) }),
      svg("path", { class: "sn-verify", d: path(timed.map((s) => [s.begin + s.draft, s.end - 0.12 * (s.end - s.begin - s.draft)])) }),
    );
    this.mineCount = h("span", { class: "sn-count" });
    const lanes = [h("span", { class: "sn-lane-name" }, this.run.model.method), h("span", { class: "sn-lane" }, mine, (this.mineHead = h("i", { class: "sn-head-line" }))), this.mineCount];
    const total = this.data.tokens.length - this.data.kept;
    mine.setAttribute("aria-label", `This run: ${plural(total, "token")} in ${time(this.seconds)}`);
    let note = null;
    if (plain) {
      const theirs = svg("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": `Plain decoding, ${plain.basis}: ${time(plain.times.at(-1))}` });
      const starts = [0, ...plain.times];
      theirs.append(svg("path", { class: "sn-plain-bar", d: path(plain.times.map((t, i) => [starts[i], t - 0.12 * (t - starts[i])]).filter(([a, b]) => b > a)) }));
      this.plainCount = h("span", { class: "sn-count" });
      lanes.push(h("span", { class: "sn-lane-name" }, "plain ", h("em", {}, plain.measured ? "measured" : "estimated")), h("span", { class: "sn-lane" }, theirs, (this.plainHead = h("i", { class: "sn-head-line" }))), this.plainCount);
      const ratio = this.seconds ? plain.times.at(-1) / this.seconds : 0;
      note = `${time(this.seconds)} against ${time(plain.times.at(-1))} for plain decoding: ${plain.bound ? "at most " : ""}${ratio.toFixed(2)} times as fast. Plain decoding: ${plain.basis}.`;
    } else this.plainHead = this.plainCount = null;
    const measure =
      this.model.get("can_run") && this.run.model.method !== "plain" && !plain?.measured
        ? h("button", { type: "button", class: "sn-button", onclick: () => this.ask({ type: "plain", run: this.run.id, row: this.row }) }, "Measure plain decoding")
        : null;
    return h(
      "section",
      { class: "sn-replay", "aria-label": "Replay" },
      h("div", { class: "sn-player" }, this.play, this.range, this.where, pace),
      h("div", { class: "sn-lanes" }, lanes),
      h("div", { class: "sn-lane-note" }, h("span", { class: "sn-key sn-draft-key" }), "draft", h("span", { class: "sn-key sn-verify-key" }), "verify", note ? h("span", { class: "sn-muted" }, note) : "", measure),
    );
  }

  toggle() {
    if (this.playing) return this.pause();
    const last = Math.max(this.seconds, this.data.plain?.times.at(-1) ?? 0);
    if (this.clock >= last) this.clock = 0;
    let before = performance.now();
    const tick = (now) => {
      this.clock += Math.max(0, now - before) / 1000 / this.slower;
      before = now;
      if (this.clock >= last) {
        this.clock = last;
        this.pause();
      } else this.playing = requestAnimationFrame(tick);
      this.step = this.stepsAt(this.clock);
      this.showClock();
    };
    this.play.textContent = "❚❚";
    this.play.setAttribute("aria-label", "Pause");
    this.playing = requestAnimationFrame(tick);
  }

  pause() {
    if (!this.playing) return;
    cancelAnimationFrame(this.playing);
    this.playing = null;
    this.play.textContent = "▶";
    this.play.setAttribute("aria-label", "Play");
  }

  stepsAt(clock) {
    const { steps } = this.data;
    let low = 0;
    let high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle].end <= clock + 1e-9) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  toStep(step) {
    this.step = step;
    this.clock = step ? this.data.steps[step - 1].end : 0;
    if (step === this.end) this.clock = Math.max(this.clock, this.data.plain?.times.at(-1) ?? 0);
    this.showClock();
  }

  showClock() {
    const { steps, plain, tokens, kept } = this.data;
    const step = steps[this.step - 1];
    const shown = Math.max(kept, step && !step.kept ? step.first + step.count : 0);
    const next = steps[this.step];
    const drafting = next && !next.kept && next.end > next.begin && this.clock >= next.begin + next.draft ? next.first + next.accepted : shown;
    const last = Math.max(this.seconds, plain?.times.at(-1) ?? 0) || 1;
    const behind = plain && this.clock < last ? plain.times.filter((t) => t <= this.clock).length : tokens.length;
    this.spans.forEach((span, i) => {
      span.classList.toggle("sn-future", i >= shown);
      span.classList.toggle("sn-drafting", i >= shown && i < drafting);
      span.classList.toggle("sn-plain-here", i === behind - 1 && behind < shown);
    });
    for (const one of this.rejected) one.classList.toggle("sn-future", Number(one.dataset.step) >= this.step);
    this.range.value = this.step;
    const at = `step ${this.step} of ${this.end}`;
    this.range.setAttribute("aria-valuetext", `${at}, ${time(this.clock)}, ${plural(shown, "token")}`);
    this.where.textContent = `${at} · ${time(Math.min(this.clock, last))}`;
    this.mineCount.textContent = plural(shown - kept, "token");
    this.mineHead.style.left = `${(100 * Math.min(this.clock, last)) / last}%`;
    if (this.plainHead) {
      this.plainHead.style.left = this.mineHead.style.left;
      this.plainCount.textContent = plural(Math.max(0, (this.clock < last ? behind : plain.times.length) - kept), "token");
    }
  }

  // ---- the tree of runs
  drawTree() {
    const runs = this.model.get("runs");
    if (runs.length < 2) return "";
    const list = (parent) => {
      const children = runs.filter((one) => one.parent === parent);
      if (!children.length) return null;
      return h(
        "ul",
        {},
        children.map((one) =>
          h("li", {}, h("button", { type: "button", class: "sn-run", "aria-current": one.id === this.run.id ? "true" : null, onclick: () => this.set("current", one.id) }, ...this.describe(one)), list(one.id)),
        ),
      );
    };
    return h("nav", { class: "sn-tree", "aria-label": "Runs" }, h("span", { class: "sn-label" }, "Runs"), list(null));
  }

  describe(run) {
    if (run.parent === null) return ["the first run"];
    const tokens = run.model.rows[0].tokens.slice(run.index + 1, run.index + 9).map((token) => token.text).join("");
    return [h("span", { class: "sn-muted" }, `at token ${run.index + 1}: `), h("b", {}, run.text.replaceAll("\n", "⏎")), h("span", { class: "sn-muted" }, ` ${tokens.replaceAll("\n", "⏎")}…`)];
  }
}

export default {
  render({ model, el }) {
    const view = new TokenView(model, el);
    return () => view.close();
  },
};
