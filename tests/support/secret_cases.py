"""Lines with secrets, made up here in the forms in which people leave them in files, and lines that only look so."""

import base64
import random
import string


_random = random.Random(70)


def key(length, letters=string.ascii_letters + string.digits):
    """A random key with a digit and a letter; in parts, so that no scanner finds it in this file."""
    while True:
        made = "".join(_random.choices(letters, k=length))
        if any(map(str.isdigit, made)) and any(map(str.isalpha, made)):
            return made


HEX, UPPER = "0123456789abcdef", string.ascii_uppercase + string.digits
TOKEN = f"hf_{key(34)}"
BLOCK = f"PRIVATE KEY-----\n{key(64)}\n{key(64)}\n-----END "
SECRETS = [
    # Python
    f'os.environ["HF_TOKEN"] = "{key(37)}"',
    f"os.environ['DB_PASSWORD'] = '{key(12)}'",
    f'os.environ.setdefault("WANDB_API_KEY", "{key(40, HEX)}")',
    f'os.putenv("DB_PASSWORD", "{key(16)}")',
    f'os.environ.update({{"API_TOKEN": "{key(24)}"}})',
    f'os.environ.update(SMTP_PASSWORD="{key(10)}")',
    f'login(token="{key(34)}")',
    f"login(token='{TOKEN}', add_to_git_credential=True)",
    f'api = HfApi(token="{key(37)}")',
    f'model = Model.from_pretrained("a/b", use_auth_token="{key(34)}")',
    f'wandb.login(key="{key(40)}")',
    f'API_KEYS = ["{key(40)}"]',
    f'API_KEYS = [\n    "{key(40)}",\n]',
    f'PASSWORDS = ("{key(9)}", "{key(9)}")',
    f'password: str = "{key(9)}"',
    f'db_password: str | None = "{key(9)}"',
    f'TOKEN = "hf_" + "{key(34)}"',
    f'TOKEN = ("hf_{key(14)}"\n         "{key(20)}")',
    f'headers = {{"Authorization": f"Bearer {key(32)}"}}',
    f'headers["X-Api-Key"] = "{key(32)}"',
    f'requests.get(url, auth=("bob", "x"), params={{"api_key": "{key(20)}"}})',
    f'client = OpenAI(api_key="sk-{key(32)}")',
    f'SECRET_KEY = b"{key(24)}"',
    f'password = r"{key(8)}\\d"',
    f'if password == "x": secret = "{key(12)}"',
    f'boto3.client("s3", aws_access_key_id="AK" "IA{key(16, UPPER)}", aws_secret_access_key="{key(40)}")',
    # json, also within json
    f'{{"name": "DB_PASSWORD", "type": "plain", "value": "{key(12)}"}}',
    f'{{"value": "{key(12)}", "name": "SMTP_PASSWORD"}}',
    f'{{"key": "API_TOKEN",\n "value": "{key(12)}"}}',
    f'{{"Passwort": "{key(12)}"}}',
    f'{{"clientSecret": "{key(12)}"}}',
    f'{{"env": "{{\\"access_token\\": \\"{key(12)}\\"}}"}}',
    f'{{"url": "https://host/x?t=hf%5F{key(34)}"}}',
    f'{{"url": "https://host/x?access%5Ftoken%3D{key(20)}"}}',
    f'{{"url": "https://host/x?access_token={key(20)}"}}',
    f'{{"x": "\\u0068f_{key(34)}"}}',
    f'{{"x": "{base64.b64encode(TOKEN.encode()).decode()}"}}',
    f'{{"x": "{base64.b64encode(f"DB_PASSWORD={key(12)}".encode()).decode()}"}}',
    # yaml, toml, ini, .env, shells, containers
    f"hub_token: {TOKEN}",
    f"password: {key(12)}",
    f"- name: DB_PASSWORD\n  value: {key(12)}",
    f"- name: DB_PASSWORD\n  value: '{key(12)}'",
    f"[server]\nsecret_key = '{key(20)}'",
    f"[client]\npwd = {key(10)}",
    f"GITHUB_TOKEN={key(36)}",
    f"DB_PASSWORD={key(12)}",
    f'export MLFLOW_TRACKING_PASSWORD="{key(12)}"',
    f"export HF_TOKEN={key(34)} && python train.py",
    f"ENV DB_PASSWORD {key(12)}",
    f"ARG API_KEY={key(12)}",
    f"python train.py --wandb_key {key(40, HEX)}",
    f'["train.py", "--hub_token", "{key(20)}"]',
    f"curl -u bob:{key(12)} https://example.org",
    f"curl -H 'Authorization: Bearer {key(32)}' https://example.org",
    f"machine example.org login bob password {key(12)}",
    # Connections, keys and services
    f"postgres://bob:{key(12)}@example.org/runs",
    f"redis://:{key(12)}@example.org:6379",
    f"Server=db;User Id=bob;Password={key(12)};",
    f"AccountName=runs;AccountKey={key(86)}==;EndpointSuffix=core.windows.net",
    f"-----BEGIN RSA {BLOCK}RSA PRIVATE KEY-----",
    f'"-----BEGIN OPENSSH {BLOCK}OPENSSH PRIVATE KEY-----"'.replace("\n", "\\n"),
    f"<password>{key(12)}</password>",
    f"AK{'IA'}{key(16, UPPER)}",
    f"ghp_{key(36)}",
    f"xox{'b-'}{_random.randrange(10**11, 10**12)}-{_random.randrange(10**12, 10**13)}-{key(24)}",
    f"sk-proj-{key(48)}",
    f"api_org_{key(34)}",
]
DIGEST, UUID = key(64, HEX), "550e8400-e29b-41d4-a716-446655440000"
HARMLESS = [
    # Read, asked for or passed on
    'token = os.environ["HF_TOKEN"]',
    'token = os.environ.get("HF_TOKEN", "")',
    'password = os.getenv("DB_PASSWORD", default=None)',
    'if os.environ["CI_TOKEN"] == "present": pass',
    'password = getpass.getpass("Password: "), input("Name: ")',
    "password = read_password1(path)",
    "login(token=token)",
    'headers = {"Authorization": f"Bearer {token}"}',
    'print(f"API key: {key[:4]}…")',
    "secret = hashlib.sha256(data).hexdigest()",
    "self.secret_key = config.secret_key_v2",
    'parser.add_argument("--password", help="the password of the database")',
    'parser.add_argument("--hub_token", type=str, default=None)',
    'raise ValueError("password: must be longer than 8 characters")',
    'secrets = ["password", "api_key", "access_token"]',
    'os.environ["TOKENIZERS_PARALLELISM"] = "false"',
    "api_key: ${{ secrets.API_KEY }}",
    "export HF_TOKEN=$(cat ~/.cache/token1)",
    "export HF_TOKEN=${HF_TOKEN:-none}",
    'password = settings["database"]["password"]',
    'valueFrom: {secretKeyRef: {name: db, key: "password"}}',
    'url = f"postgres://{user}:{password}@{host}/runs"',
    "password: Optional[str] = Field(default=None, min_length=12)",
    # Placeholders
    'login(token="your-token-here")',
    'login(token="hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx")',
    'OpenAI(api_key="sk-...")',
    'OpenAI(api_key="sk-xxxxxxxxxxxxxxxxxxxxxxxx")',
    'password = "<password>"',
    '{"hub_token": "<HUB_TOKEN>"}',
    '{"api_key": "YOUR_API_KEY"}',
    '{"password": "********"}',
    '{"password": null, "secret": true}',
    "password: changeme",
    "DB_PASSWORD=insert-password",
    "postgres://user:password@localhost/runs",
    "{{ password }}",
    "secret_key: vault:runs/key1",
    '{"token": "[REDACTED]"}',
    # Words of models and tokenizers
    '{"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "[UNK]"}',
    '{"bos_token": {"content": "<|startoftext|>", "lstrip": false}}',
    '{"pad_token_id": 50256, "max_new_tokens": 1048576}',
    "num_tokens=77",
    "num_key_value_heads = config.num_key_value_heads",
    "key = self.k_proj(states).view(batch, 16, length, 64)",
    "query, key, value = qkv.chunk(3, dim=-1)",
    'key="transformer.layers.11.attention.self.key.weight"',
    'key = "model_layers_0_self_attn_q_proj_weight"',
    "image_token = self.img2bpe_mapping_tensor1",
    "embed_tokens = SeamlessM4TScaledWordEmbedding(32, 64)",
    '{"sort_key": "image_0001", "cache_key": "train-2026-01-31-12h"}',
    '{"attn_implementation": "flash_attention_2", "key": "value"}',
    # Digests, numbers and public keys
    f'{{"sha256": "{DIGEST}"}}',
    f'{{"cache_key": "{DIGEST}"}}',
    f'{{"key": "{UUID}", "run": "{UUID}"}}',
    f"commit {key(40, HEX)}",
    f'weights = "sha256:{DIGEST}"',
    f"ssh-rsa AAAAB3NzaC1yc2E{key(80)} bob@example.org",
    f'{{"public_key": "{key(44)}"}}',
    "https://example.org:8080/a@b",
    "-----BEGIN PUBLIC KEY-----",
    'if "-----BEGIN PRIVATE KEY-----" in text: refuse()',
    "The password protected archive has 12345678 files: secrets.tar.gz, see page 12",
    "Tokens: 1.2e12; keys: 32768; heads: 16",
]
