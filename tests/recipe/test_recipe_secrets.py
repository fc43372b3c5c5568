"""Secrets: found by whole words in names, refused, and shown nowhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from trainkit.cli.diagnostics import render_diagnostics
from trainkit.errors import Diagnostic, RecipeError
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.secrets import is_secret_name, mask, mask_line, mask_private_keys, mask_words

Solve = Callable[..., Resolved]
Refuse = Callable[..., list[Diagnostic]]
SHORT = "train: {steps: 3}\n"
SECRET = "hf_AbCd1234"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "password",
        "db.password",
        "DB_PASSWORD_PROD",
        "apikey",
        "apiKey",
        "api-key",
        "hfToken",
        "TOKEN1",
        "TOKEN_2",
        "client_secret",
        "credentials",
        "PASSWD",
        "secret",
        "key",
        "token",
        "HTTPAuth",
        "FILE_KEY",
        "vault_file_key",
        "ssh_path_token",
        "PGPASSWORD",
        "PASS",
        "DB_PASS",
        "SMTP_PASS_PROD",
        "dbPass",
        "sshpass",
        "PASSPHRASE",
        "KEYPASSPHRASE",
        "MYSQLPASSWD",
        "PASS_PHRASE",
        "PASSCODE",
        "VAULTPASS",
        "JENKINSPASS",
        "mqttPassPhrase",
    ],
)
def test_names_that_say_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer_name",
        "max_tokens",
        "max_new_tokens",
        "num_key_value_heads",
        "keyboard",
        "monkey",
        "TOKENIZERS_PARALLELISM",
        "pad_token",
        "eos_token",
        "text_key",
        "data_file_keys",
        "image_path_key",
        "PASSWORD_FILE",
        "token_count",
        "secretary",
        "NCCL_DEBUG",
        "",
        "_",
        "AWS_ACCESS_KEY_ID",
        "COMPASS",
        "BYPASS_X",
        "BYPASS",
        "PASSES",
        "forward_pass",
        "PGPASSFILE",
        "pass_through",
        "PASS_COUNT",
        "PASSENGER",
        "low_pass",
        "TRESPASS",
        "num_passes",
    ],
)
def test_names_that_do_not(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "place", "remedy"),
    [
        (f"env: {{HF_TOKEN: {SECRET}, A: 1}}\n", "r.yaml:1:17", "list HF_TOKEN under env_from"),
        (f"env:\n  HF_TOKEN: '{SECRET}'\n", "r.yaml:2:13", "list HF_TOKEN under env_from"),
        (f"env:\n  HF_TOKEN: >-\n    {SECRET}\n    {SECRET}\n", "r.yaml:2:13", "env_from"),
        ("env: {DB_PASSWORD: 12345678}\n", "r.yaml:1:20", "env_from"),
        (f"program: {{args: {{api-key: {SECRET}}}}}\n", "r.yaml:1:27", "list API_KEY under env_from"),
        (f"program: {{args: [--x, '--token={SECRET}']}}\n", "r.yaml:1:23", "env_from"),
        (f"program: {{args: [--token, {SECRET}, --x]}}\n", "r.yaml:1:27", "env_from"),
        (f"env!: {{HF_TOKEN: {SECRET}}}\n", "r.yaml:1:18", "env_from"),
    ],
)
def test_a_secret_that_is_written_out_is_refused_and_shown_nowhere(
    refuse: Refuse, text: str, place: str, remedy: str
) -> None:
    errors = refuse(text + SHORT)
    assert [each.origin.place if each.origin else "" for each in errors] == [place]
    assert remedy in errors[0].hint
    for shown in (render_diagnostics(errors), str(errors), str(RecipeError(errors))):
        assert SECRET not in shown
        assert "12345678" not in shown


@pytest.mark.parametrize(
    "request_", [{"overrides": (f"env.HF_TOKEN={SECRET}",)}, {"environ": {"TRAINKIT__ENV__HF_TOKEN": SECRET}}]
)
def test_a_secret_on_the_command_line_or_in_a_variable_is_masked_too(refuse: Refuse, request_: dict[str, Any]) -> None:
    errors = refuse(SHORT, **request_)
    assert "HF_TOKEN is a secret by its name" in errors[0].what
    assert SECRET not in str(errors)


def test_a_secret_is_masked_in_errors_about_other_things(refuse: Refuse) -> None:
    for text in (
        f"hf_token: {SECRET}\n",
        f"env: {{HF_TOKEN: {SECRET}, A: [1]}}\n",
        f"env: {{HF_TOKEN: {SECRET}\n",
        f"env: {{HF_TOKEN: {SECRET}, HF_TOKEN: 2}}\n",
        f"env: {{HF_TOKEN: [{SECRET}]}}\n",
        f"program: {{kind: torch, module: t, args: [{{api_key: {SECRET}}}, {{api_key: {SECRET}}}]}}\n",
    ):
        errors = refuse(text + SHORT)
        assert errors
        assert SECRET not in render_diagnostics(errors) + str(errors)


@pytest.mark.parametrize("variable", ["{name: HF_TOKEN, value: %s}", "{value: %s, name: HF_TOKEN}"])
def test_the_value_of_a_variable_of_pods_is_masked(refuse: Refuse, variable: str) -> None:
    pod = f"{{spec: {{containers: [{{env: [{variable % SECRET}], image: 1}}]}}}}"
    errors = refuse(f"train: {{steps: 1}}\ncluster: {{kind: kubernetes, no_key: 1, pod: {pod}}}\n")
    shown = render_diagnostics(errors)
    assert "no_key" in shown
    assert "***" in shown
    assert SECRET not in shown


@pytest.mark.parametrize("place", ["containers", "initContainers"])
def test_the_value_of_a_variable_of_pods_is_refused(refuse: Refuse, solve: Solve, place: str) -> None:
    pod = f'{{"spec": {{"{place}": [{{"name": "trainkit", "env": [{{"name": "DB_PASS", "value": "Geheim7"}}]}}]}}}}'
    cluster = '{"kind": "kubernetes", "image": "x", "volumes": ["runs:/data"], "pod": %s}'
    for request in ({"overrides": (f"cluster={cluster % pod}",)}, {"recipe": f"cluster: {cluster % pod}\n{SHORT}"}):
        (error,) = refuse(request.pop("recipe", SHORT), **request)
        assert error.key == f"cluster.pod.spec.{place}.0.env.0.value"
        assert "DB_PASS" in error.what
        assert "valueFrom" in error.hint
        assert "Geheim7" not in render_diagnostics([error]) + str(error)
    reference = '"valueFrom": {"secretKeyRef": {"name": "x", "key": "DB_PASS"}}'
    pod = pod.replace('"value": "Geheim7"', reference)
    solve(f"cluster: {cluster % pod}\n{SHORT}")


@pytest.mark.parametrize(
    ("text", "override"),
    [
        ("", "program.script=https://u:Geheim7@h/x.py"),
        ("", "strategy={kind: zero2, config: 'https://u:Geheim7@h/x.json'}"),
        ("extends: https://u:Geheim7@h/x.yaml\n", "seed=1"),
        ("extends: ./https://u:Geheim7@h/strategy/fsdp.yaml\n", "seed=1"),
        ("", f"train.steps={'x' * 45}-ghp_{'Ab3dEf6hIj9lMn2pQr5tUv8xYz1BcD4eFg7H'}"),
    ],
)
def test_a_path_that_a_secret_became_and_a_text_that_is_cut_show_nothing_of_it(
    refuse: Refuse, text: str, override: str
) -> None:
    errors = refuse(text + SHORT, overrides=(override,))
    shown = render_diagnostics(errors) + str(errors)
    assert "Geheim7" not in shown
    assert "ghp_" not in shown


def test_pairs_of_a_name_and_a_value_are_masked_in_a_line() -> None:
    assert mask_line('[{"name": "DB_PASS", "value": "a b"}]') == '[{"name": "DB_PASS", "value": ***}]'
    assert mask_line("[{value: Geheim7, name: DB_PASS}]") == "[{value: ***, name: DB_PASS}]"
    assert mask_line("{name: pad_token, value: x}") == "{name: pad_token, value: x}"


def test_the_body_of_a_private_key_is_not_shown_under_an_error(refuse: Refuse) -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpGeheim7\n\n Geheim7==\n-----END RSA PRIVATE KEY-----"
    errors = refuse(f"env:\n  A: '{key}\n{SHORT}") + refuse(f"env:\n  A:\n  {key}\n{SHORT}")
    shown = render_diagnostics(errors) + str(errors)
    assert "Geheim7" not in shown
    assert "***" in shown
    assert mask_private_keys(f"a\n{key}\nb").splitlines()[2:] == ["***", "", " ***", key.splitlines()[-1], "b"]


def test_a_secret_in_a_weaker_layer_is_refused_although_it_is_replaced(refuse: Refuse) -> None:
    files = {"r.yaml": f"extends: a.yaml\n{SHORT}env!: {{A: x}}\n", "a.yaml": f"env: {{HF_TOKEN: {SECRET}}}\n"}
    (error,) = refuse(files)
    assert error.origin is not None
    assert error.origin.source == "a.yaml"


def test_harmless_names_and_empty_values_pass(solve: Solve) -> None:
    text = (
        "env: {TOKENIZERS_PARALLELISM: 'false', HF_TOKEN: ''}\n"
        "program: {args: {max_tokens: 5, pad_token: x, use_token: true}}\n"
    )
    assert solve(text + SHORT).recipe.env["HF_TOKEN"] == ""


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("append_concat_token", "False"), ("num_keys", "3"), ("use_auth_token", "True"), ("token_type_key", "x"),
        ("span_key", "end_date"), ("n_keys", "1e3"),
        ("placeholder_token", "<cat-toy2>"), ("new_token", "<new1>+<new2>"),
        ("token", "true"), ("hub_token", "none"), ("password", "no"),
    ],
)  # fmt: skip
def test_switches_numbers_and_plain_words_are_none(solve: Solve, word: str, value: str) -> None:
    text = f"program: {{kind: torch, module: t, args: [--{word}, '{value}']}}\n"
    assert solve(text).recipe.program.args == [f"--{word}", value]
    assert mask_words([f"--{word}", value, f"--{word}={value}"]) == [f"--{word}", value, f"--{word}={value}"]
    assert mask_line(f"--{word} {value}") == f"--{word} {value}"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("api_key", "abc"), ("token", "abc"), ("password", "secret"), ("db_password", "12345678"), ("hf_token", "x"),
        ("my_token", "hf_AbCd1234"), ("span_key", "a" * 20), ("sort_by_key", "0123456789ab"),
    ],
)  # fmt: skip
def test_what_may_be_a_credential_stays_one(refuse: Refuse, word: str, value: str) -> None:
    errors = refuse(f"program: {{kind: torch, module: t, args: [--{word}, '{value}']}}\n")
    assert errors[0].what == f"the value of --{word} in program.args is a secret by its name, written out in the recipe"
    assert f"list {word} under program.public" in errors[0].hint
    assert mask_words([f"--{word}", value]) == [f"--{word}", "***"]


def test_a_name_under_program_public_is_no_secret(solve: Solve, refuse: Refuse) -> None:
    text = "program: {kind: torch, module: t, args: {span_key: SPAN_2b}}\n"
    assert refuse(text)[0].key == "program.args.span_key"
    assert solve(text.replace("args:", "public: [span_key], args:")).recipe.program.args == {"span_key": "SPAN_2b"}


def test_lines_and_words_are_masked() -> None:
    assert mask("x") == "***"
    assert mask_line("env: {HF_TOKEN: abc, A: 1}") == "env: {HF_TOKEN: ***, A: 1}"
    assert mask_line("  api_key: a b c") == "  api_key: ***"
    assert mask_line("max_tokens: 4  # the token count") == "max_tokens: 4  # the token count"
    words = ["run", "--token", "abc", "--api-key=abc", "env.HF_TOKEN=abc", "--seed", "3"]
    assert mask_words(words) == ["run", "--token", "***", "--api-key=***", "env.HF_TOKEN=***", "--seed", "3"]


@pytest.mark.timeout(20)  # trying every shorter name in a word would take 20 minutes
@pytest.mark.parametrize("unit", ["a", "A", "a.", "é-", "a ", "token ", "token: 'x' [", "-token x {"])
def test_the_time_to_mask_a_line_grows_with_its_length_and_no_faster(unit: str) -> None:
    line = unit * (200_000 // len(unit))
    assert "bcd" not in mask_line(f"{line} --token=bcd")


def test_the_caret_below_a_secret_does_not_tell_its_length(refuse: Refuse) -> None:
    (error,) = refuse(f"env: {{HF_TOKEN: {SECRET}}}\n" + SHORT)
    assert render_diagnostics([error]).splitlines()[2] == "    | " + " " * 16 + "^^^"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", ["a", "a ", "a=", "a_", "--a", "token ", "key: ", "'", '"x', "{", "token: {", "- "])
def test_a_line_of_any_length_is_masked_in_time_that_grows_with_it(piece: str) -> None:
    line = piece * 200_000  # hours, if it grew with the square
    assert len(mask_line(line)) <= len(line)
    assert len(mask_words([line])[0]) <= len(line)


def test_of_a_file_that_is_no_text_nothing_is_shown(refuse: Refuse) -> None:
    files = {"r.yaml": "extends: environ.yaml\n" + SHORT, "environ.yaml": f"DATABASE=//u:{SECRET}@h\0HOME=/root\0"}
    errors = refuse(files)
    assert "NUL byte" in errors[0].what
    assert SECRET not in render_diagnostics(errors)


@pytest.mark.parametrize("listed", ["-1e+308", "abc", "{a: 1}", "true"])
def test_what_is_no_list_of_harmless_names_is_an_error(refuse: Refuse, listed: str) -> None:
    errors = refuse(f"program: {{kind: torch, module: t, public: {listed}}}\n")
    assert "program.public" in {each.key for each in errors}


# Made up, each as long as the service makes it.
LETTERS = "Ab3dEf6hIj9lMn2pQr5tUv8xYz1BcD4eFg7HiJ0k"
TOKENS = [
    f"hf_{LETTERS[:34]}", f"ghp_{LETTERS[:36]}", f"gho_{LETTERS[:36]}", f"github_pat_{LETTERS}{LETTERS}",
    f"sk-{LETTERS}", f"sk-proj-{LETTERS[:20]}-{LETTERS}", f"sk-ant-api03-{LETTERS}", "AKIA1234567890ABCDEF",
    f"glpat-{LETTERS[:20]}", f"xoxb-123456789012-{LETTERS}", f"AIza{LETTERS[:35]}", f"npm_{LETTERS[:36]}",
]  # fmt: skip
PLAIN = [
    "hf_trainer", f"hf_{LETTERS[:33]}", f"hf_{LETTERS[:35]}", f"ghp_{LETTERS[:20]}", "AKIA",
    "sk-learn-random-forest-classifier", f"x{TOKENS[0]}", "http://127.0.0.1:8080/a@b", "docker://registry:5000/team/image@sha256:0123",
    "https://user@host/x", "postgres://u:$PW@h", "postgres://u:${PW}@h", "s3://bucket/a:b@c", "a:b@c", "git@host:a/b",
    "postgres://u:$db_pw@h", "postgres://u:<password>@h", "http://h:$PORT/a@b", "http://[::1]:8080/a@b",
    "curl http://proxy:3128 && git clone git@github.com:a/b", "name:tag@sha256:0123",
    "reg.io:5000/name:tag@sha256:0123",
]  # fmt: skip
WHERE = {
    "env.A": "env: {A: '%s'}\n",
    "program.args.x": "program: {kind: torch, module: t, args: {x: '%s'}}\n",
    "program.args.1": "program: {kind: torch, module: t, args: [a, '%s']}\n",
    "program.args.0": "program: {kind: torch, module: t, args: ['--x=%s']}\n",
    "model.path": "model: {kind: hf, path: '%s'}\n",
    "data.mix.0.path": "data: {kind: dataset, streaming: true, mix: [{path: '%s'}]}\n",
    "cluster.setup.0": "cluster: {kind: slurm, setup: ['export A=%s']}\n",
    "container.options.1": "container: {kind: docker, image: i, options: [-x, '-eA=%s']}\n",
}


@pytest.mark.parametrize("key", WHERE)
@pytest.mark.parametrize("value", [*TOKENS, "postgres://u:Geheim7@h/db", "https://user:Geheim7@github.com/a/b"])
def test_a_secret_is_known_by_itself_wherever_it_stands(refuse: Refuse, key: str, value: str) -> None:
    secret = "Geheim7" if "Geheim7" in value else value
    errors = refuse(WHERE[key] % value + SHORT)
    (found,) = [each for each in errors if " by its value" in each.what]
    assert found.key == key
    assert found.origin is not None
    assert found.origin.place.startswith("r.yaml:1:")
    assert "env_from" in found.hint
    assert secret not in render_diagnostics(errors) + str(errors) + str(RecipeError(errors))


SET = [
    "https://h/x?password=Geheim7", "https://h/x?a=1&access_token=Geheim7", "jdbc:mysql://h/db?user=u&password=Geheim7",
    "postgres://u:$Geheim7@h", "postgres://u:<Geheim7@h", "postgres://u:Ge/heim7@h", "postgres://u:Ge heim7@h",
    "postgres://u:p@ss/Geheim7@h", "export DB_PASS=Geheim7", "--export=ALL,DB_PASS=Geheim7", "DB_PASS=Geheim7",
]  # fmt: skip


@pytest.mark.parametrize("key", ["env.A", "program.args.x", "program.args.1", "model.path", "cluster.setup.0"])
@pytest.mark.parametrize("value", SET)
def test_a_password_in_the_midst_of_a_value_is_one(refuse: Refuse, key: str, value: str) -> None:
    errors = refuse(WHERE[key] % value + SHORT)
    assert key in [each.key for each in errors if " by its value" in each.what]
    shown = render_diagnostics(errors) + str(errors) + mask_line(value) + str(mask_words([value]))
    assert not [each for each in ("eheim7", "Ge/", "Ge ") if each in shown]


NOT_SET = [
    "DB_PASS=$DB_PASS", "export API_KEY=$(cat key)", "export TOKEN='${TOKEN}'", "DB_PASS=", "PASSWORD_FILE=/run/pw",
    "--num_passes=3", "max_tokens=100", "pad_token=<pad>", "tokenizer.eos_token=</s>", "--export=ALL,HF_TOKEN",
    "sorted(x, key=len)", "f(token=self.token)", "password=getpass()", "--comment=key=V1", "https://h/x?sort_key=name",
    "-----BEGIN CERTIFICATE----- MIIE",
]  # fmt: skip


@pytest.mark.parametrize("value", NOT_SET)
def test_what_stands_for_a_password_in_the_midst_of_a_value_is_none(solve: Solve, value: str) -> None:
    assert solve(f"env: {{A: {json.dumps(value)}}}\n{SHORT}").recipe.env["A"] == value
    assert solve(f"program: {{kind: torch, module: t, args: [x, {json.dumps(value)}]}}\n").recipe.program.args


@pytest.mark.parametrize("section", ["env", "program.args", "model.args"])
@pytest.mark.parametrize("name", ["postgres://u:Geheim7@h", "DB_PASS=Geheim7"])
def test_a_name_may_be_a_secret(refuse: Refuse, section: str, name: str) -> None:
    for request in ({"overrides": (f'{section}={{"{name}": 1}}',)}, {"overrides": (f"{section}.{name}=1",)}):
        errors = refuse(SHORT, **request)
        assert "Geheim7" not in render_diagnostics(errors) + str(errors)
    errors = refuse(SHORT, overrides=(f'{section}={{"{name}": 1}}',))
    assert "is a secret by its value" in errors[0].what
    assert errors[0].hint.startswith("take it out")


def test_a_login_before_the_name_of_an_image_is_a_secret(refuse: Refuse, solve: Solve) -> None:
    (error,) = refuse(f"container: {{kind: docker, image: 'u:Geheim7@reg.io/x'}}\n{SHORT}")
    assert error.key == "container.image"
    assert "Geheim7" not in render_diagnostics([error]) + str(error)
    for image in ("reg:5000/a/b:1@sha256:" + "0" * 64, "a:1@sha256:" + "0" * 64, "reg.io/a:1", "u:$PW@reg.io/x"):
        solve(f"container: {{kind: docker, image: '{image}'}}\n{SHORT}")


@pytest.mark.parametrize("value", PLAIN)
def test_what_only_looks_a_little_like_one_is_none(solve: Solve, value: str) -> None:
    assert solve(f"env: {{A: '{value}'}}\n" + SHORT).recipe.env["A"] == value
    assert mask_line(f"A {value}") == f"A {value}"


@pytest.mark.parametrize("value", [*TOKENS, "-----BEGIN RSA PRIVATE KEY----- MIIEpA"])
def test_tokens_are_masked_in_any_text(value: str) -> None:
    assert value not in mask_line(f"see {value}") + str(mask_words([f"x={value}", value, "--a", value]))
    assert mask_line(mask_line("u://a:b@c")) == mask_line("u://a:b@c") == "u://a:***@c"


@pytest.mark.parametrize("text", ["env: {A: '${oc.env:DB_URL}'}\n", "model: {kind: hf, path: '${oc.env:DB_URL}'}\n"])
def test_a_reference_brings_no_secret_in_whatever_the_name_of_its_variable(refuse: Refuse, text: str) -> None:
    errors = refuse(text + SHORT, environ={"DB_URL": "postgres://u:Geheim7@h/db"})
    assert "would put the value of DB_URL into the recipe, and it is a secret by its value" in errors[0].what
    assert "Geheim7" not in render_diagnostics(errors) + str(errors)


@pytest.mark.parametrize("name", ["PGPASSWORD", "DB_PASS", "PASS"])
def test_a_password_is_one_whatever_its_value(refuse: Refuse, name: str) -> None:
    (error,) = refuse(f"env: {{{name}: hunter}}\n" + SHORT)
    assert "is a secret by its name" in error.what
    assert "hunter" not in render_diagnostics([error])


def test_messages_show_no_secret_that_they_were_given() -> None:
    assert TOKENS[0] not in render_diagnostics([Diagnostic("error", f"there is no {TOKENS[0]}", hint=TOKENS[0])])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", ["://", "://a:", "://a:b", "sk-", "-----BEGIN ", "aa:/a:", "://a:${", "a:<"])
def test_a_text_of_any_length_is_searched_in_time_that_grows_with_it(piece: str) -> None:
    assert mask_line(piece * 50_000)
