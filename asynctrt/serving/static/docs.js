// The page that shows the server's OpenAPI document, and sends requests. No build step.
"use strict";
(() => {
  const TOKEN = "asynctrt-token";
  const SHORT = 200;
  const SHOWN_MAX = 20000;

  const $ = (id) => document.getElementById(id);
  let made = 0;

  function element(tag, className, content) {
    const created = document.createElement(tag);
    if (className) created.className = className;
    if (content !== undefined) created.textContent = content;
    return created;
  }

  function ask(path, options = {}) {
    const token = sessionStorage.getItem(TOKEN);
    const headers = { ...options.headers, ...(token === null ? {} : { Authorization: `Bearer ${token}` }) };
    return fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  }

  /** Indents JSON, unless it is short; any other text stays as it is, and a long one is cut. */
  function readable(text) {
    if (text.length < SHORT) return text;
    const cut = text.length > SHOWN_MAX ? `${text.slice(0, SHOWN_MAX)}\n... ${text.length - SHOWN_MAX} characters more` : null;
    if (cut !== null) return cut;
    try {
      return JSON.stringify(JSON.parse(text), null, 1);
    } catch {
      return text;
    }
  }

  /** One operation: what it is, what to send, and what came back. */
  function operation(path, method, about) {
    const box = element("details");
    const summary = element("summary");
    summary.append(element("b", method, method.toUpperCase()), " ", element("code", "", path), ` ${about.summary}`);
    box.append(summary);
    if (about.description) box.append(element("p", "quiet lines", about.description));
    const content = about.requestBody && about.requestBody.content["application/json"];
    let body = null;
    if (content) {
      made += 1;
      const label = element("label", "", "Body, as JSON");
      body = element("textarea");
      label.htmlFor = body.id = `body-${made}`;
      body.rows = 5;
      body.spellcheck = false;
      body.value = content.example === undefined ? "{}" : JSON.stringify(content.example);
      box.append(label, body);
    }
    const send = element("button", "", "Send");
    send.type = "button";
    send.setAttribute("aria-label", `Send ${method.toUpperCase()} ${path}`);
    const status = element("p", "quiet");
    status.setAttribute("role", "status");
    const answer = element("pre");
    answer.tabIndex = 0;
    answer.hidden = true;
    answer.setAttribute("role", "region");
    answer.setAttribute("aria-label", "Answer");
    const line = element("div", "ask");
    const buttons = element("p");
    buttons.append(send, status);
    line.append(buttons, answer);
    box.append(line);
    send.addEventListener("click", async () => {
      send.disabled = true;
      const began = performance.now();
      try {
        const options = body === null ? {} : { body: body.value, headers: { "Content-Type": "application/json" } };
        const response = await ask(path.slice(1), { method: method.toUpperCase(), ...options });
        const text = await response.text();
        status.textContent = `Status ${response.status}, ${Math.round(performance.now() - began)} ms`;
        answer.textContent = readable(text);
        answer.hidden = text === "";
      } catch {
        status.textContent = "The server does not answer.";
        answer.hidden = true;
      }
      send.disabled = false;
    });
    return box;
  }

  function draw(content) {
    $("release").textContent = content.info.version;
    $("about").textContent = content.info.description;
    const groups = new Map();
    for (const [path, methods] of Object.entries(content.paths)) {
      for (const [method, about] of Object.entries(methods)) {
        const [tag] = about.tags;
        if (!groups.has(tag)) groups.set(tag, []);
        groups.get(tag).push(operation(path, method, about));
      }
    }
    // The models first: they are what people come for.
    const ordered = [...groups].sort(([one], [other]) => (one === "server") - (other === "server"));
    for (const [tag, operations] of ordered) {
      const section = element("section");
      section.append(element("h2", "", tag), ...operations);
      $("operations").append(section);
    }
    const first = $("operations").querySelector("details");
    if (first) first.open = true;
  }

  async function load() {
    try {
      const response = await ask("openapi.json");
      if (response.status === 401) {
        $("about").textContent = "This server requires a token: enter it on the dashboard, then come back in this tab.";
      } else if (response.ok) {
        draw(await response.json());
      } else {
        $("about").textContent = `The server answers with status ${response.status}.`;
      }
    } catch {
      $("about").textContent = "The server does not answer. Load the page again when it does.";
    }
  }

  load();
})();
