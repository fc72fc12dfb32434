"""Build the documentation site into build/site, with every warning an error, and check all its links.

    make docs        (or: python scripts/build_site.py, with the extra `docs` installed)

mkdocs wants all pages in one folder, so build/pages is made anew each time: README as the first page, docs/, the pages
beside README, the files that pages link to (recipes, sources), and the API reference, one page per package, read from
the source: nothing is imported.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "vitruvius"
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "CONVENTIONS.md", "benchmarks/RESULTS.md")  # pages outside docs/
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
PACKAGES = {
    "attention": "parts of a core",
    "surgery": "sockets, sites, recording",
    "init": "weights at the start",
    "models": "models that take pixels",
    "data": "data sets and loaders",
    "corruptions": "noise, blur, weather, digital",
    "attacks": "attacks and norms",
    "tasks": "objectives",
    "training": "recipes and runs",
    "evaluation": "ledgers, reports, metrics",
    "shifts": "published sets of shifted images",
    "compression": "maps, masks, sparse inference",
    "analysis": "what attention does",
    "studies": "comparisons over runs",
    "report": "pages and figures",
    "tracking": "CSV, TensorBoard, W&B",
    "converters": "checkpoints of other code",
    "targets": "anything that names a model",
}


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    write_page(ROOT / "README.md", PAGES / "index.md")
    for name in BESIDE:
        write_page(ROOT / name, PAGES / name)
    for page in sorted((ROOT / "docs").glob("*.md")):
        write_page(page, PAGES / page.name)
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        (PAGES / "notebooks" / f"{notebook.stem}.md").write_text(notebook_page(notebook), encoding="utf-8")
    (PAGES / "gallery.md").write_text(gallery(), encoding="utf-8")
    write_reference()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode != 0:
        sys.exit(done.returncode)
    faults = check_links(SITE)
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        sys.exit(1)
    print(f"{SITE / 'index.html'}: {len(list(SITE.rglob('*.html')))} pages")


def write_page(source: Path, target: Path) -> None:
    """Copy a page; links that leave docs/ lead to a copy of their target inside the site."""

    def moved(found: re.Match[str]) -> str:
        return f"{found[1]}{new_target(found[2], source, target)}{found[3]}"

    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(LINK.sub(moved, source.read_text(encoding="utf-8")), encoding="utf-8")


def new_target(link: str, source: Path, target: Path) -> str:
    """The link on the moved page: to the page or file where it now lies."""
    parts = urlsplit(link)
    if parts.scheme or not parts.path:
        return link
    named = (source.parent / parts.path).resolve()
    if not named.exists() or not named.is_relative_to(ROOT):
        return link  # mkdocs will say so
    inside = place_in_site(named)
    own_page = named.suffix == ".md" and inside.parts[0] != "files"  # which comes by itself
    if not own_page and not (PAGES / inside).exists():
        bring(named, PAGES / inside)
    relative = os.path.relpath(PAGES / inside, target.parent)
    return f"{relative}#{parts.fragment}" if parts.fragment else relative


def bring(named: Path, target: Path) -> None:
    """Copy a file that a page links to; of a folder all files, and a page that lists them."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if named.suffix == ".md":
        write_page(named, target)
        return
    if named.is_file():
        shutil.copy(named, target)
        return
    shutil.copytree(named, target.parent, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.md"))
    for page in named.rglob("*.md"):
        write_page(page, PAGES / place_in_site(page))
    files = sorted(path.relative_to(named).as_posix() for path in named.rglob("*") if path.is_file())
    rows = "\n".join(f'<li><a href="{re.sub(r".md$", ".html", name)}">{name}</a></li>' for name in files)
    title = f"<title>{named.name}</title><h1>{named.name}</h1>"
    target.write_text(f'<!doctype html><meta charset="utf-8">{title}<ul>\n{rows}\n</ul>\n', encoding="utf-8")


def place_in_site(named: Path) -> Path:
    """Where a file of the repository lies in the site. Python and YAML files get a name that browsers show as text."""
    inside = named.relative_to(ROOT)
    if inside == Path("README.md"):
        return Path("index.md")
    if inside.parts[0] == "docs":
        return Path(*inside.parts[1:])
    if named.is_dir():
        return Path("files", inside, "index.html")
    if inside.suffix in (".py", ".yaml", ".cff"):
        return Path("files", f"{inside}.txt")
    if inside.suffix == ".md" and inside.as_posix() not in BESIDE:
        return Path("files", inside)
    return inside


def notebook_page(notebook: Path) -> str:
    """A notebook to read: its text, and its code as blocks; the file itself is linked to."""
    pieces = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            text = f"```python\n{text}\n```"
        pieces.append(text)
    link = f"[The notebook itself]({notebook.name}), for Jupyter; the tests run it."
    return "\n\n".join([pieces[0], link, *pieces[1:]]) + "\n"


def gallery() -> str:
    """A page with all figures of the documentation."""
    lines = ["# Gallery", "", "Every figure is made by the code of this package; the page it belongs to says how.", ""]
    for figure in sorted((ROOT / "docs" / "figures").glob("*.png")):
        title = figure.stem.replace("_", " ")
        lines += [f"## {title[0].upper()}{title[1:]}", "", f"![{title}](figures/{figure.name})", ""]
    return "\n".join(lines)


def write_reference() -> None:
    """One page per package, with what it exports and its public modules. The navigation in mkdocs.yml names them."""
    folder = PAGES / "api"
    folder.mkdir()
    homes = {name: home_of(name) for name in exported(SOURCE / "__init__.py") if name != "__version__"}
    body = "\n".join(f"::: {home}.{name}\n" for name, home in homes.items())
    title = "# vitruvius\n\nWhat `import vitruvius` offers.\n\n"
    (folder / "vitruvius.md").write_text(title + body, encoding="utf-8")
    for package, what in PACKAGES.items():
        (folder / f"{package}.md").write_text(reference_page(package, what), encoding="utf-8")


def reference_page(package: str, what: str) -> str:
    folder = ROOT / "src" / "vitruvius" / package
    modules = [path for path in sorted(folder.rglob("*.py")) if is_public(path.relative_to(folder))]
    lines = [f"# vitruvius.{package}", "", f"{what[0].upper()}{what[1:]}.", ""]
    offered = exported(folder / "__init__.py")
    if offered:
        lines += ["`from vitruvius." + package + " import …`: " + ", ".join(f"`{name}`" for name in offered) + ".", ""]
    for module in modules:
        dotted = ".".join(["vitruvius", package, *module.relative_to(folder).with_suffix("").parts])
        lines += [f"::: {dotted.removesuffix('.__init__')}", ""]
    return "\n".join(lines)


def is_public(path: Path) -> bool:
    return not any(part.startswith("_") and part != "__init__.py" for part in path.parts)


def exported(module: Path) -> dict[str, str]:
    """The names that a package exports and their modules; nothing is imported."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            imports = [item for item in node.body if isinstance(item, ast.ImportFrom)]
            return {alias.name: str(item.module) for item in imports for alias in item.names}
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return {str(name): "" for name in ast.literal_eval(node.value)}
    return {}


def home_of(name: str) -> str:
    """The module that defines a public name of the package."""
    home = exported(SOURCE / "__init__.py")[name]
    init = SOURCE.parent / home.replace(".", "/") / "__init__.py"
    return (exported(init).get(name) if init.is_file() else "") or home


class Links(HTMLParser):
    """The links and anchors of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []  # scripts, styles, pictures
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.append(value)
                if name == "src" or tag == "link":
                    self.loaded.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def check_links(site: Path) -> list[str]:
    """Links inside the site that lead nowhere, and whatever a page would load from elsewhere."""
    pages: dict[Path, Links] = {}
    for page in sorted(site.rglob("*.html")):
        pages[page.resolve()] = Links()
        pages[page.resolve()].feed(page.read_text(encoding="utf-8"))
    faults = []
    for page, found in pages.items():
        if page.name == "404.html":  # its links are for a server's root
            continue
        here = page.relative_to(site.resolve())
        faults += [f"{here}: loads {link} from elsewhere" for link in found.loaded if urlsplit(link).netloc]
        for link in found.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not target.exists():
                faults.append(f"{here}: {link} does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                faults.append(f"{here}: {link} has no such anchor")
    return faults


if __name__ == "__main__":
    main()
