"""The views of an application: before it runs, while it runs, and of its requests afterwards.

    live        a running server: `ingress status`, `ingress top`, the page
    admin       the listener for operators: `/metrics`, `/api/snapshot`, the page
    timeline    a recording of requests: `ingress trace`
    inspection  the place where each callable will run: `ingress explain`

Only `live` imports other folders of the four. Engines start views by way of `engine_views`.
Requests pay nothing for this room unless they are recorded.
"""
