"""Look at models and runs: analyses of attention, studies over runs, the page."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from vitruvius._errors import ConfigError, DataError, RunError, VitruviusError

RECORDED = 8  # pictures of a run that `report` shows
logger = logging.getLogger(__name__)


def look(
    target: str,
    /,
    *pictures: str,
    data: str | None = None,
    images: int | None = None,
    threat: str | None = None,
    attention: list[str] | None = None,
    beside: str | None = None,
    masks: Path | None = None,
    sparsity: float | None = None,
    of_class: Annotated[str | None, Parameter(name="--class")] = None,
    out: Path = Path("look.html"),
    png: Path | None = None,
    serve: bool = False,
    port: int = 0,
    open: bool = False,
    trust_plugins: bool = False,
) -> Any:
    """Where a model looks on your pictures: every layer and head, rollout, explanations, classes; one page.

    Args:
        target: a run folder, a model name, or a .safetensors file with model.name=….
        pictures: files, or folders of them, and settings such as 'model.kwargs={img_size: 224}'.
        data: look at images of this data set instead, e.g. digits (default of a run without pictures: its own).
        images: of a folder the first N (default: 16); of data a fixed random choice of N (default: 4).
        threat: show each picture attacked too, e.g. pgd:eps=2/255.
        attention: put this in the place of the model's; several stand side by side, e.g. --attention rpc:iterations=2
            --attention softmax.
        beside: another model, side by side.
        masks: prune by this file of `vitruvius masks`, side by side.
        sparsity: prune this share of pairs, those with the least attention on these pictures, side by side.
        of_class: explain this class, a name or number (default: the best five).
        out: the page (default: look.html).
        png: write figures too, PNG and PDF, into this folder.
        serve: no file: a live page on this machine, where pictures are dropped in and attacked (extra `live`).
        port: of the live page (default: a free one).
        open: open the page in a browser.
        trust_plugins: import the modules a run names under plugins:, which runs code.
    """
    from vitruvius._files import Lock, check_out
    from vitruvius.request import open_request
    from vitruvius.targets.base import open_target

    overrides = [word for word in pictures if "=" in word and not Path(word).exists()]
    files = [word for word in pictures if word not in overrides]
    for file in files:
        if "://" not in file and not Path(file).exists():
            raise DataError(f"no picture at {file}; expected a file or a folder of them.")
    if files and data is not None:
        raise ConfigError(f"--data {data} and pictures ({files[0]}) are both given; choose one of them.")
    if data is not None:
        overrides.append(f"data.dataset={data}")
    if serve and any((threat, attention, beside, masks, sparsity, of_class, png)):
        raise ConfigError("--serve shows a live page, where attack, attention and pruning are chosen; leave them out.")
    if not serve:
        if port:
            raise ConfigError(f"--port {port} is of the live page; say --serve too.")
        check_out(out, example="look.html")
    if png is not None:
        check_out(png / "overview.png", example="overview.png")
    from_data = not files and (data is not None or not serve)
    with open_request(
        target,
        overrides,
        images=(4 if images is None else images) if from_data else None,
        labels=False,
        data_needed=from_data,
        trust_plugins=trust_plugins,
        alone=True,
    ) as request:
        from vitruvius.evaluation.threats import make_threat
        from vitruvius.look.looking import compare, look_at, variant_of
        from vitruvius.look.pictures import pictures_of, read_pictures

        attack = None if threat is None else make_threat(threat, where="--threat")
        shown = read_pictures(files, request.model.data_config, images=images) if files else []
        shown = pictures_of(request.loader) if from_data else shown
        variants = [variant_of(request.target, request.process.device)]
        if beside is not None:
            settings = [word for word in overrides if word.startswith(("data.", "device=", "plugins="))]
            other = open_target(beside, settings, data_needed=False)
            variants.append(variant_of(other, request.process.device))
        variants = compare(variants, shown, attention=attention or (), masks=masks, sparsity=sparsity)
        if serve:
            from vitruvius.look.serving import serve as serve_page

            def announce(address: str) -> None:
                print(f"{address}\nCtrl-C ends it.", flush=True)  # at once; the command stays

            return serve_page(variants[0], shown, port=port, open_browser=open, announce=announce)
        with request.bar("looking") as bar:
            found = look_at(variants, shown, threat=attack, of_class=of_class, progress=bar)
        with Lock(out, file=True):
            written = [found.save(out), *(found.save_figures(png) if png else ())]
    print(found)
    print(*written, sep="\n")
    if open:
        import webbrowser

        webbrowser.open(out.resolve().as_uri())
    return found


def analyse(
    target: str,
    /,
    *what: str,
    images: int | None = None,
    seed: int = 0,
    attack: str = "pgd:eps=4/255",
    out: Path | None = None,
    trust_plugins: bool = False,
) -> Any:
    """Look inside attention: kernel PCA, norms, explanations and more, chance beside every number.

    Args:
        target: a run folder or a model name.
        what: analyses and explanations (default: all analyses), and settings, e.g. norms gammas:variant=released
            relevance data.root=/imagenet.
        images: look at N images of the validation split, a fixed random choice (default: all).
        seed: of chance (default: 0).
        attack: explanations also of the images after this attack; none: of clean ones alone (default: pgd:eps=4/255).
        out: folder for table and figures (default: RUN/analysis; for a model by name: none).
        trust_plugins: import the modules a run names under plugins:, which runs code.
    """
    from vitruvius.request import open_request

    overrides = [word for word in what if "=" in word and ":" not in word.partition("=")[0]]
    names = [word for word in what if word not in overrides]
    figures: list[Path] = []
    with open_request(
        target, overrides, images=images, out=out, writes="analysis", labels=False, trust_plugins=trust_plugins
    ) as request:
        from vitruvius.analysis.analysing import analyse, split_asked
        from vitruvius.evaluation.threats import make_threat
        from vitruvius.report.analysis_figures import save_figures

        split_asked(names)  # what is misspelt is found before a model is loaded
        threat = None if attack == "none" else make_threat(attack, where="--attack")
        facts = {"model": request.config.model.name, "target": Path(target).name}
        with request.bar("analysing") as bar:
            table = analyse(
                request.model,
                request.loader,
                *names,
                images=images,
                seed=seed,
                attack=threat,
                process=request.process,
                progress=bar,
                facts=facts,
            )
        if out is not None or request.target.is_run:
            folder = request.folder

            def keep() -> list[Path]:
                table.save(folder)
                return save_figures(table, folder)

            figures = request.process.on_first(keep)
            request.save_config()
    print(table)
    if figures:
        print("\nfigures, each as PNG and PDF:", *(path for path in figures if path.suffix == ".png"), sep="\n")
    return table


def study(
    name: str,
    /,
    *words: str,
    images: int | None = None,
    out: Path | None = None,
    trust_plugins: bool = False,
) -> Path:
    """An experiment over several runs: a table and a figure; `vitruvius list studies` names them.

    Args:
        name: attack-effectiveness, attack-convergence, eps-sweep, kpca, released-protocol.
        words: runs or model names, and settings such as steps=20 or data.root=/imagenet.
        images: study N images of the validation split, a fixed random choice (default: 512; kpca: 100).
        out: folder for table and figure (default: runs/STUDY).
        trust_plugins: import the modules a run names under plugins:, which runs code.
    """
    from vitruvius._registry import check_name

    check_name("study", "studies", name)  # before anything slow is imported
    from vitruvius._files import check_out
    from vitruvius.targets.base import kind_of

    for word in words:
        if "=" not in word:
            kind_of(word)
    if all("=" in word for word in words):
        raise ConfigError(f"study {name!r} needs at least one run folder or model name.")
    from vitruvius.studies import split_words
    from vitruvius.studies import study as run_study

    targets, settings = split_words(words)
    if out is not None:
        check_out(out, *targets)
    if images is not None:
        settings["images"] = images
    table = run_study(name, targets, settings, out or f"runs/{name}", on_row=show_row, trust_plugins=trust_plugins)
    print(table)
    return table


def show_row(row: Mapping[str, object]) -> None:
    """Every row of a study as soon as it is known, numbers with four digits; the table has all of them."""
    shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items() if key != "key"}
    logger.info(", ".join(f"{key} {value}" for key, value in shown.items()))


def report(
    *runs: str,
    images: int | None = None,
    threat: str = "pgd:eps=8/255,steps=10",
    title: str = "A vitruvius report",
    out: Path = Path("report.html"),
    trust_plugins: bool = False,
) -> Path:
    """One self-contained page about runs, a sweep or a study.

    Args:
        runs: runs, sweeps or studies, and settings for where the images of runs are now, such as data.root=/imagenet.
        images: show attention on N images of the validation split, a fixed random choice (default: 8 where the data
            can be opened; 0: only what is recorded).
        threat: attacks those images (default: pgd:eps=8/255,steps=10).
        title: of the page (default: A vitruvius report).
        out: the page (default: report.html).
        trust_plugins: import the modules a run names under plugins:, which runs code.
    """
    from vitruvius._files import Lock, check_out
    from vitruvius.targets.base import local_run

    overrides = [word for word in runs if "=" in word and not Path(word).exists()]
    folders = [Path(local_run(word)) for word in runs if word not in overrides]
    for folder in folders:
        if not folder.exists():
            raise RunError(f"{folder} does not exist; a report needs run folders, as `vitruvius train` writes them.")
    if not folders:
        raise RunError("a report needs at least one run folder; none was given.")
    from vitruvius.evaluation import make_threat
    from vitruvius.report.page import check_page, write_page

    check_out(out, *folders, example="report.html")
    check_page(out)
    made = make_threat(threat, where="--threat")
    for run in runs_to_record(folders, images):
        try:
            record_run(run, overrides, images or RECORDED, made, trust_plugins=trust_plugins)
        except (VitruviusError, OSError, RuntimeError) as error:  # the page is written without this viewer
            if images is not None:
                raise
            logger.info("%s: no attention viewer: %s", run, " ".join(str(error).split()))
    with Lock(out, file=True):
        page = write_page(folders, out, title=title)
    print(page)
    return page


def runs_to_record(folders: Sequence[Path], images: int | None) -> list[Path]:
    """The runs among `folders` whose attention is to be recorded for the page.

    images: as the flag: asked for, those of sweeps and studies too; None: those of which nothing newer than their
        weights is there; 0: none.
    """
    from vitruvius._checks import check_count
    from vitruvius.report.page import is_study, is_sweep, runs_in
    from vitruvius.report.run import check_runs
    from vitruvius.targets.run_folder import WEIGHTS

    runs = [folder for folder in folders if not is_sweep(folder) and not is_study(folder)]
    if runs:
        check_runs(runs)
    if images:
        check_count(images, "--images")
        return runs_in(folders)

    def is_recorded(run: Path) -> bool:
        record = run / "attention.json"
        if not record.is_file() or not (run / "model.json").is_file():
            return False
        weights = [run / name for name in WEIGHTS if (run / name).is_file()]
        return all(file.stat().st_mtime <= record.stat().st_mtime for file in weights)

    return [run for run in runs if images is None and not is_recorded(run)]


def record_run(run: Path, overrides: Sequence[str], images: int, threat: Any, *, trust_plugins: bool = False) -> None:
    """Keep the sites of a run's model, and its attention on some images of its validation split, clean and attacked.

    A model without a head, which has no answer to change, is shown clean images alone.
    """
    from vitruvius.request import open_request

    settings = ["data.workers=0", *overrides]
    with open_request(
        str(run), settings, images=images, out=run, labels=False, trust_plugins=trust_plugins, alone=True
    ) as request:
        from vitruvius.analysis.recording import record_pictures
        from vitruvius.data.base import class_words
        from vitruvius.evaluation.threats import describe

        request.labels = request.model.num_classes > 0
        attack = threat if request.labels else None
        done = f"clean and under {describe(threat)}" if attack else "clean, since the model has no head"
        logger.info("%s: recording attention on %d pictures, %s", run, images, done)
        loader = request.loader  # only now: what cannot be opened is not touched
        with request.bar(f"recording {run}") as bar:
            names = class_words(request.config.data)
            record_pictures(request.folder, request.model, loader, attack, names=names, progress=bar)
