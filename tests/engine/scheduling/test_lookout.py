"""What a watcher sees of a real core while requests come, run and end."""

from engine.types import unpack_tokens
from engine.views import EngineView, LaneView, TreeView
from tests.engine.tiny import PAGE, Driver, prompt, tiny_core


def lanes(driver: Driver) -> dict[str, LaneView]:
    return {lane.id: lane for lane in driver.core.view(tree=False).lanes}


def tree(driver: Driver) -> TreeView:
    """Of the survey that is complete: an idle core surveys a small tree at once."""
    view: EngineView = driver.core.view(tree=True)
    assert view.tree is not None
    return view.tree


def test_a_request_is_seen_from_its_wait_to_its_end() -> None:
    driver = Driver(tiny_core(max_running=1))
    first = driver.add(prompt(1, 100), max_tokens=4)
    second = driver.add(prompt(2, 40), max_tokens=2, tenant="other")
    assert {lane.status for lane in lanes(driver).values()} == {"waiting"}
    driver.step()
    seen = lanes(driver)
    assert (seen[first].status, seen[second].status) == ("running", "waiting")
    assert 0 < seen[first].num_computed_tokens < seen[first].num_prompt_tokens == 100
    assert [phase.name for phase in seen[first].phases] == ["queue", "prefix_match", "prefill"]
    assert seen[first].since_ns == seen[first].phases[-1].end_ns
    assert seen[second].tenant == "other"
    driver.run()
    assert lanes(driver) == {}


def test_a_request_without_credit_is_seen_as_paused() -> None:
    driver = Driver(tiny_core())
    request = driver.add(prompt(1, 10), max_tokens=8, credits=2)
    while driver.core.has_work:
        driver.step()
    assert lanes(driver)[request].status == "paused"


def test_the_tree_tells_what_is_shared_used_and_by_whom() -> None:
    driver = Driver(tiny_core())
    shared = prompt(1, 3 * PAGE)
    driver.answer(shared + prompt(2, PAGE), 2)
    driver.answer(shared + prompt(3, PAGE), 2)
    request = driver.add(shared + prompt(4, PAGE), max_tokens=8)
    driver.step()
    seen = tree(driver)
    root, trunk, *branches = seen.nodes
    assert (root.page, root.parent, root.label) == (-1, -1, "public")
    assert (trunk.parent, trunk.start, trunk.num_tokens, trunk.num_pages) == (0, 0, 48, 3)
    assert trunk.num_referenced == 3, "the third request runs on it"
    assert seen.num_pages == trunk.subtree_pages == root.subtree_pages
    assert all(branch.parent == 1 and branch.start == 48 for branch in branches)
    assert len(branches) >= 2
    node = driver.core.read_node(trunk.page)
    assert node is not None
    assert unpack_tokens(node.token_ids).tolist() == shared
    driver.core.abort(request)
    driver.run()
    assert all(node.num_referenced == 0 for node in tree(driver).nodes)


def test_salts_are_told_apart_and_unknown_pages_are_nobodys() -> None:
    driver = Driver(tiny_core())
    driver.add(prompt(1, 40), 1, salt="blue")
    driver.run()
    assert [node.label for node in tree(driver).nodes if node.page < 0] == ["public / blue"]
    used = next(node.page for node in tree(driver).nodes if node.page >= 0)
    driver.core.flush()
    assert [driver.core.read_node(page) for page in (used, -1, 10**9)] == [None] * 3
    assert tree(driver).nodes == ()
