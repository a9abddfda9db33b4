"""Serve a web page that sends files to a model and shows the answers as they arrive, over a websocket.

    pip install 'asynctrt[demo,serve]' starlette uvicorn
    python examples/browser/identify_files.py        # then open http://127.0.0.1:8080/

The model is the one that magika ships. The application is plain Starlette. The engine opens and closes with
it; KServe's routes include its websocket. The page makes the model's rows out of the files itself, so that a
file of any size is a message of 8 KiB.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse
from starlette.routing import Mount, Route

import asynctrt
from asynctrt.cli.demo import ContentModel
from asynctrt.client import JAVASCRIPT
from asynctrt.serving import kserve_app

HERE = Path(__file__).parent
MODEL = ContentModel()
CONFIG = MODEL.config


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with asynctrt.open(MODEL.path) as app.state.engine:
        yield


async def page(_: Request) -> FileResponse:
    return FileResponse(HERE / "index.html")


async def client(_: Request) -> FileResponse:
    """Return asynctrt's own client for browsers."""
    return FileResponse(JAVASCRIPT, media_type="text/javascript")


async def describe(request: Request) -> JSONResponse:
    """Return what the page needs to turn a file into a row, and an answer into a name."""
    return JSONResponse(
        {
            "input": request.app.state.engine.inputs[0].name,
            "beginning": CONFIG["beg_size"],
            "end": CONFIG["end_size"],
            "block": CONFIG["block_size"],
            "padding": CONFIG["padding_token"],
            "least": CONFIG["min_file_size_for_dl"],
            "labels": CONFIG["target_labels_space"],
            "shown": CONFIG["overwrite_map"],
            "thresholds": CONFIG["thresholds"],
            "threshold": CONFIG["medium_confidence_threshold"],
            "texts": sorted(MODEL.texts),
        }
    )


app: Starlette = Starlette(
    routes=[
        Route("/", page),
        Route("/asynctrt.js", client),
        Route("/model.json", describe),
        # A function, as the engine exists only once the application has started.
        Mount("/kserve", kserve_app(lambda: app.state.engine)),
    ],
    lifespan=lifespan,
)

if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8080
    uvicorn.run(app, port=port, ws="websockets-sansio", log_level="warning")
