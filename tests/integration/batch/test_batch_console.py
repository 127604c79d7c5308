"""The console's batch section over a real batch service: who sees it, and when that dies."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import httpx

from aqua_batch.service.rows import keys
from aqua_batch.service.rows.database import Database
from aqua_coordinator.access.tokens import Role, create_token
from aqua_protocol.batches import BatchSummary
from harness.batch_service import BatchServiceProcess, chat_line, completed, submit, wait_until
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.counting_server import CountingServer

OPERATOR = "o" * 32
PATH = "/v1/console/batches"


def asked(url: str, token: str | None = None) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.get(url, headers=headers, timeout=60, trust_env=False)


async def made_keys(folder: Path) -> dict[str, str]:
    database = Database(f"sqlite:///{folder}/batch.db")
    found = {}
    for tenant in ("red", "blue"):
        add = partial(keys.add_key, tenant=tenant, note="", now_s=0.0)
        found[tenant], _ = await database.write(add)
    database.close()
    return found


async def test_readers_see_batches_of_all_tenants_and_a_tenant_its_own(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    reader = create_token(tokens, roles=[Role.READER])[0]
    member = create_token(tokens, roles=[Role.PRODUCER, Role.CONSUMER])[0]
    tenant = create_token(tokens, roles=[Role.READER], tenant="red")[0]
    known = await made_keys(tmp_path)
    with (
        CountingServer() as engine,
        BatchServiceProcess(
            tmp_path,
            [engine.url],
            listen_host="0.0.0.0",  # noqa: S104 - there are keys
            operator_token=OPERATOR,
        ) as service,
        data_dir() as books,
        CoordinatorProcess(
            books,
            AQUA_TOKENS_FILE=str(tokens),
            AQUA_BATCH_URL=service.url,
            AQUA_BATCH_OPERATOR_TOKEN=OPERATOR,
        ) as coordinator,
    ):
        lines = [chat_line("a", "hold for-long"), chat_line("b", "a secret prompt")]
        red = submit(service.client(known["red"]), lines)
        wait_until(service.client(known["red"]), red.id, lambda batch: completed(batch) == 1)
        blue = submit(service.client(known["blue"]), [chat_line("c", "fine")])
        wait_until(service.client(known["blue"]), blue.id)

        own = asked(f"{service.url}/aqua/batches", known["blue"])
        found = BatchSummary.model_validate_json(own.content)
        assert [(each.batch_id, each.tenant) for each in found.batches] == [(blue.id, "blue")]
        assert found.open_requests == 0
        every = BatchSummary.model_validate_json(
            asked(f"{service.url}/aqua/batches", OPERATOR).content
        )
        assert [each.batch_id for each in every.batches] == [red.id, blue.id]
        assert (every.counts, every.open_requests) == ({"in_progress": 1, "completed": 1}, 1)
        for wrong in (None, "o" * 31, OPERATOR + "o", "aqua_0_0"):
            assert asked(f"{service.url}/aqua/batches", wrong).status_code == 401
        # An operator's token shows this, and opens nothing else.
        assert asked(f"{service.url}/v1/batches", OPERATOR).status_code == 401

        shown = asked(coordinator.url + PATH, reader)
        assert shown.status_code == 200
        assert "script-src 'self'" in shown.headers["content-security-policy"]
        for word in (red.id, blue.id, "1 of 2", "1 running, 1 request to go"):
            assert word in shown.text
        for secret in ("secret prompt", "hold", OPERATOR):
            assert secret not in shown.text
        assert asked(coordinator.url + PATH, tenant).status_code == 204
        assert asked(coordinator.url + PATH, member).status_code == 403
        assert asked(coordinator.url + PATH).status_code == 401


def test_without_a_batch_service_there_is_no_section_and_with_a_dead_one_a_sentence(
    tmp_path: Path,
) -> None:
    with CountingServer() as engine, data_dir() as books:
        with CoordinatorProcess(books) as coordinator:
            assert asked(coordinator.url + PATH).status_code == 204
        with (
            BatchServiceProcess(tmp_path, [engine.url]) as service,
            CoordinatorProcess(books, AQUA_BATCH_URL=service.url) as coordinator,
        ):
            assert "There is no batch yet." in asked(coordinator.url + PATH).text
            service.kill()
            while "There is no batch yet." in (shown := asked(coordinator.url + PATH)).text:
                pass  # For as long as an answer is kept: two seconds.
            assert shown.status_code == 200
            assert "The batch service does not answer." in shown.text
            for fragment in ("cluster", "happened", "timeline"):
                assert asked(f"{coordinator.url}/v1/console/{fragment}").status_code == 200
