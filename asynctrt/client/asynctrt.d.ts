/** KServe's names of datatypes. */
export type Datatype =
  | "BOOL" | "UINT8" | "UINT16" | "UINT32" | "UINT64" | "INT8" | "INT16" | "INT32" | "INT64"
  | "FP16" | "BF16" | "FP32" | "FP64" | "BYTES";

/** Elements in row-major order. FP16 is a Float16Array where there is one; otherwise, like BF16, its bits. */
export type TensorData =
  | Uint8Array | Uint16Array | Uint32Array | BigUint64Array | Int8Array | Int16Array | Int32Array | BigInt64Array
  | Float32Array | Float64Array | Uint8Array[] | string[];

export interface Tensor {
  datatype: Datatype;
  /** The first number usually counts the rows. The shape of a scalar is []. */
  shape: number[];
  /** For an answer's BYTES: one Uint8Array per element. */
  data: TensorData;
}

/** Make a tensor. Throws a TypeError for an unknown datatype, a RangeError if data and shape do not fit. */
export function tensor(
  datatype: Datatype, shape: readonly number[], data: TensorData | readonly number[] | readonly bigint[]): Tensor;

/** An error on the server or on the way there. */
export class ServerError extends Error {
  /**
   * The name of the error's class on the server, such as "QueueFullError", "DeadlineError", "InputError";
   * "NotConnectedError" if nothing was sent, "ConnectionLostError" if the connection was lost after that,
   * "AnswerError" if the answer cannot be read.
   */
  readonly type: string;
  /** The HTTP status of the error; 0 if there was no answer. */
  readonly status: number;
}

export interface ClientOptions {
  /** The server's bearer token, if it requires one. */
  token?: string;
  /** Requests in flight at once; further calls wait. Default: 64. */
  maxInFlight?: number;
  /**
   * The maximum number of times a request is sent. It is retried if the server has certainly not begun it:
   * its queue was full, or the model was not loaded. Default: 1.
   */
  attempts?: number;
  /** Whether a request may be computed twice, so that it is also retried if its connection was lost. */
  idempotent?: boolean;
  /** Called whenever the connection is made, lost or closed. */
  onstate?: (state: "connected" | "connecting" | "closed") => void;
}

export interface CallOptions {
  /** The model's version; the newest by default. */
  version?: string | number;
  /** Milliseconds until the answer must arrive, over all attempts. Then the request is cancelled. */
  deadline?: number;
  /** Cancels the request on the server when it is aborted; the call throws its reason. */
  signal?: AbortSignal;
}

export interface InferOptions extends CallOptions {
  /** The wanted outputs; all by default. */
  outputs?: readonly string[];
  /** 1 is the most urgent; the model's default if not given. */
  priority?: number;
  /** Milliseconds that the request may be queued on the server. */
  timeout?: number;
  /** As in ClientOptions, for this request. */
  idempotent?: boolean;
}

export interface TensorMetadata {
  name: string;
  datatype: Datatype;
  /** -1 for a dimension of any size. */
  shape: number[];
}

export interface ModelMetadata {
  name: string;
  versions: string[];
  platform: string;
  inputs: TensorMetadata[];
  outputs: TensorMetadata[];
}

/** A client of one websocket. It connects at once, and reconnects whenever the connection is lost. */
export class Client {
  /**
   * `url` may be relative to the page, and begin with http as well as with ws: "/v2/ws".
   * Throws a RangeError if `maxInFlight` or `attempts` is less than 1.
   */
  constructor(url: string | URL, options?: ClientOptions);
  readonly url: string;
  readonly connected: boolean;
  /** The number of requests sent but not answered yet. */
  readonly inFlight: number;
  /**
   * Run rows through a model; on the websocket of a single model its name is ignored.
   * Throws a ServerError, the reason of `signal`, or a RangeError for a time that is not a number ≥ 0.
   */
  infer(model: string, inputs: Record<string, Tensor>, options?: InferOptions): Promise<Record<string, Tensor>>;
  /** Return KServe's description of a model. */
  metadata(model: string, options?: CallOptions): Promise<ModelMetadata>;
  /** Close the connection; requests in flight fail. */
  close(): void;
}
