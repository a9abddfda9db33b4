// Call models of an asynctrt server from a browser, over one websocket. No dependencies; types are in asynctrt.d.ts.
//
//   import { Client, tensor } from "./asynctrt.js";
//   const client = new Client("wss://example.org/v2/ws");
//   const { output } = await client.infer("resnet", { input: tensor("FP32", [1, 4], [1, 2, 3, 4]) }, { deadline: 500 });
//   output.data;  // A Float32Array.

const encoder = new TextEncoder(), decoder = new TextDecoder();
const PREFIX = 4;                             // Bytes of a message that hold the length of its JSON header.
const DELAY_MIN_MS = 50, DELAY_MAX_MS = 2000; // The pause before another attempt; it doubles each time.

const ARRAYS = {
  BOOL: Uint8Array, UINT8: Uint8Array, UINT16: Uint16Array, UINT32: Uint32Array, UINT64: BigUint64Array,
  INT8: Int8Array, INT16: Int16Array, INT32: Int32Array, INT64: BigInt64Array, FP32: Float32Array,
  FP64: Float64Array, FP16: globalThis.Float16Array ?? Uint16Array, BF16: Uint16Array,
};

// Errors which mean that the server has not begun a request, so that any request may be retried.
const NOT_BEGUN = new Set(["NotConnectedError", "QueueFullError", "ModelNotReadyError"]);
const IF_IDEMPOTENT = new Set(["ConnectionLostError", "EngineClosedError", "LifecycleError", "OverloadError"]);
const TIMER_MAX_MS = 2 ** 31 - 1;             // Browsers treat a longer delay as 0.

/** An error. `type` is the name of its class on the server, `status` its HTTP status. */
export class ServerError extends Error {
  constructor(message, type, status) {
    super(message);
    this.name = this.type = type;
    this.status = status;
  }
}

/** Make a tensor. `data` is a typed array, an array of numbers or, for BYTES, of strings or Uint8Arrays. */
export function tensor(datatype, shape, data) {
  const size = shape.reduce((product, dim) => product * dim, 1);
  if (datatype !== "BYTES" && !(datatype in ARRAYS)) {
    throw new TypeError(`unknown datatype "${datatype}"; datatypes: ${Object.keys(ARRAYS).join(", ")}, BYTES`);
  }
  if (data.length !== size) {
    throw new RangeError(`a tensor of shape [${shape}] has ${size} elements, and ${data.length} were given`);
  }
  const kind = ARRAYS[datatype];
  const element = datatype.endsWith("INT64") ? BigInt : Number;
  return { datatype, shape: [...shape], data: !kind || data instanceof kind ? data : kind.from(data, element) };
}

function written({ datatype, data }) {
  if (datatype !== "BYTES") return new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  const items = Array.from(data, (item) => typeof item === "string" ? encoder.encode(item) : item);
  const bytes = new Uint8Array(items.reduce((sum, item) => sum + 4 + item.length, 0));
  const view = new DataView(bytes.buffer);
  let at = 0;
  for (const item of items) {
    view.setUint32(at, item.length, true);
    bytes.set(item, at + 4);
    at += 4 + item.length;
  }
  return bytes;
}

// Milliseconds, or undefined for no limit.
function limit(name, value) {
  if (value === undefined || value === Infinity) return undefined;
  if (!(value >= 0)) throw new RangeError(`${name} must be a number of milliseconds ≥ 0, not ${value}`);
  return value;
}

function read(datatype, bytes) {
  if (datatype !== "BYTES") return new ARRAYS[datatype](bytes);
  const view = new DataView(bytes), items = [];
  for (let at = 0; at < bytes.byteLength;) {
    const length = view.getUint32(at, true);
    items.push(new Uint8Array(bytes, at + 4, length));
    at += 4 + length;
  }
  return items;
}

function outputsOf(head, message, start) {
  const outputs = {};
  for (const { name, datatype, shape, parameters } of head.outputs) {
    const end = start + parameters.binary_data_size;
    const data = read(datatype, message.slice(start, end));
    if (end > message.byteLength || data.length !== shape.reduce((product, dim) => product * dim, 1)) {
      throw new RangeError(`output "${name}" of shape [${shape}] has ${data.length} elements`);
    }
    outputs[name] = { datatype, shape, data };
    start = end;
  }
  return outputs;
}

/** A client of one websocket. It connects at once, and reconnects whenever the connection is lost. */
export class Client {
  #url; #token; #attempts; #idempotent; #maxInFlight; #onstate;
  #socket = null; #closed = false; #number = 0; #delay = DELAY_MIN_MS; #timer = 0; #held = 0;
  #waiting = new Map();  // By request id: the functions that settle its promise.
  #turns = [];           // Calls that wait until fewer are in flight.
  #opening = [];         // Calls that wait for the connection.

  constructor(url, { token = "", maxInFlight = 64, attempts = 1, idempotent = false, onstate = () => {} } = {}) {
    if (!(maxInFlight >= 1 && attempts >= 1)) {
      throw new RangeError(`maxInFlight and attempts must be at least 1, not ${maxInFlight} and ${attempts}`);
    }
    const at = new URL(url, globalThis.location?.href);
    at.protocol = at.protocol.replace("http", "ws");
    this.#url = at.href;
    this.#token = token;
    this.#attempts = attempts;
    this.#idempotent = idempotent;
    this.#maxInFlight = maxInFlight;
    this.#onstate = onstate;
    this.#connect();
  }

  get url() { return this.#url; }
  get connected() { return this.#socket?.readyState === WebSocket.OPEN; }
  get inFlight() { return this.#waiting.size; }

  /** Run rows through a model; see asynctrt.d.ts for the options and errors. */
  async infer(model, inputs, { outputs, version, priority, timeout, deadline, signal, idempotent } = {}) {
    const queued = Math.min(limit("timeout", timeout) ?? Infinity, limit("deadline", deadline) ?? Infinity);
    const raw = Object.values(inputs).map(written);
    const head = {
      model_name: model,
      inputs: Object.entries(inputs).map(([name, { datatype, shape }], index) =>
        ({ name, datatype, shape, parameters: { binary_data_size: raw[index].length } })),
      parameters: { binary_data_output: true },
    };
    if (version) head.model_version = String(version);
    if (outputs) head.outputs = outputs.map((name) => ({ name }));
    if (priority) head.parameters.priority = priority;
    if (queued < Infinity) head.parameters.timeout = Math.max(1, Math.round(queued * 1000));
    return this.#persist(head, raw, deadline, signal, idempotent ?? this.#idempotent);
  }

  /** Return KServe's description of a model. */
  async metadata(model, { version, deadline, signal } = {}) {
    const head = { metadata: true, model_name: model, model_version: String(version ?? "") };
    return this.#persist(head, [], deadline, signal, true);
  }

  /** Close the connection; requests in flight fail. */
  close() {
    this.#closed = true;
    clearTimeout(this.#timer);
    this.#socket?.close();
    this.#fail(new ServerError("this client is closed", "NotConnectedError", 0));
    this.#onstate("closed");
  }

  async #persist(head, raw, deadline, signal, idempotent) {
    const late = new AbortController();
    const timer = (limit("deadline", deadline) ?? Infinity) > TIMER_MAX_MS ? 0 : setTimeout(() => late.abort(
      new ServerError(`no answer within the deadline of ${deadline} ms`, "DeadlineError", 503)), deadline);
    const stop = signal ? AbortSignal.any([signal, late.signal]) : late.signal;
    try {
      for (let attempt = 1, delay = DELAY_MIN_MS; ; attempt++, delay = Math.min(2 * delay, DELAY_MAX_MS)) {
        try {
          return await this.#send(head, raw, stop);
        } catch (error) {
          const may = NOT_BEGUN.has(error.type) || (idempotent && IF_IDEMPOTENT.has(error.type));
          if (attempt >= this.#attempts || this.#closed || stop.aborted || !may) throw error;
        }
        await pause(delay * (1 + Math.random()) / 2, stop);
      }
    } finally {
      clearTimeout(timer);
    }
  }

  async #send(head, raw, stop) {
    stop.throwIfAborted();
    if (this.#held < this.#maxInFlight) this.#held++;
    else await this.#wait(this.#turns, stop);  // Each call that ends hands over its turn.
    try {
      if (!this.connected) await this.#wait(this.#opening, stop);
      stop.throwIfAborted();  // It may have been aborted since its turn came.
      if (!this.connected) throw new ServerError(`not connected to ${this.#url}`, "NotConnectedError", 0);
      return await this.#exchange(head, raw, stop);
    } finally {
      const next = this.#turns.shift();
      if (next) next.answer();
      else this.#held--;
    }
  }

  async #exchange(head, raw, stop) {
    const id = String(++this.#number);
    const json = encoder.encode(JSON.stringify({ id, ...head }));
    const message = new Uint8Array(raw.reduce((sum, bytes) => sum + bytes.length, PREFIX + json.length));
    new DataView(message.buffer).setUint32(0, json.length, true);
    let at = PREFIX;
    for (const bytes of [json, ...raw]) {
      message.set(bytes, at);
      at += bytes.length;
    }
    let cancel;
    try {
      return await new Promise((answer, fail) => {
        cancel = () => {
          if (this.connected) this.#socket.send(JSON.stringify({ cancel: id }));
          fail(stop.reason);
        };
        stop.addEventListener("abort", cancel);
        this.#waiting.set(id, { answer, fail });
        this.#socket.send(message);
      });
    } finally {
      stop.removeEventListener("abort", cancel);
      this.#waiting.delete(id);
    }
  }

  // Wait in a queue; an aborted call leaves it, so that it does not use up a turn.
  #wait(queue, stop) {
    if (this.#closed) throw new ServerError("this client is closed", "NotConnectedError", 0);
    return new Promise((answer, fail) => {
      const leave = () => { if (queue.includes(entry)) queue.splice(queue.indexOf(entry), 1); fail(stop.reason); };
      const done = (then) => (value) => { stop.removeEventListener("abort", leave); then(value); };
      const entry = { answer: done(answer), fail: done(fail) };
      queue.push(entry);
      stop.addEventListener("abort", leave);
    });
  }

  #connect() {
    // A browser cannot set headers, so the token is sent as the name of a subprotocol.
    const coded = btoa(String.fromCharCode(...encoder.encode(this.#token)));
    const bearer = `bearer64.${coded.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "")}`;
    const socket = new WebSocket(this.#url, this.#token ? ["asynctrt", bearer] : []);
    this.#socket = socket;
    socket.binaryType = "arraybuffer";
    socket.onopen = () => {
      this.#delay = DELAY_MIN_MS;
      for (const call of this.#opening.splice(0)) call.answer();
      this.#onstate("connected");
    };
    socket.onmessage = ({ data }) => this.#take(data);
    socket.onclose = () => {
      if (this.#closed) return;
      this.#fail(new ServerError(`the connection to ${this.#url} was lost`, "ConnectionLostError", 0));
      // Jitter: many pages that lost one server must not all reconnect at the same moment.
      this.#timer = setTimeout(() => this.#connect(), this.#delay * (1 + Math.random()) / 2);
      this.#delay = Math.min(2 * this.#delay, DELAY_MAX_MS);
      this.#onstate("connecting");
    };
  }

  #take(data) {
    let request;
    try {
      const text = typeof data === "string";
      const length = text ? 0 : new DataView(data).getUint32(0, true);
      const head = JSON.parse(text ? data : decoder.decode(new Uint8Array(data, PREFIX, length)));
      request = this.#waiting.get(head.id);
      if (!request) return;
      if (head.error !== undefined) request.fail(new ServerError(head.error, head.type ?? "ServerError", head.status));
      else if (head.metadata) request.answer(head.metadata);
      else request.answer(outputsOf(head, data, PREFIX + length));
    } catch (error) {
      const why = new ServerError(`the answer cannot be read: ${error.message}`, "AnswerError", 0);
      if (request) return request.fail(why);
      // It is unknown whose answer this was, so all requests of this connection fail.
      this.#fail(why);
      this.#socket.close();
    }
  }

  #fail(error) {
    for (const { fail } of [...this.#waiting.values()]) fail(error);
    if (this.#closed) for (const { fail } of [...this.#opening.splice(0), ...this.#turns.splice(0)]) fail(error);
  }
}

function pause(ms, stop) {
  return new Promise((done, fail) => {
    const give_up = () => { clearTimeout(timer); fail(stop.reason); };
    const timer = setTimeout(() => { stop.removeEventListener("abort", give_up); done(); }, ms);
    stop.addEventListener("abort", give_up, { once: true });
  });
}
